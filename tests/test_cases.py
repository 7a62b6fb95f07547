"""Situations in which others went wrong, each with a number, have a test that names it in its docstring."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

# numbers from 1 on, in the order in which they were collected from public trackers
LAST = 31
# what no test here shows, by number
OPEN: dict[int, str] = {}


def cases_of_tests() -> dict[int, list[str]]:
    """Tests whose docstrings name a case, by its number."""
    found: dict[int, list[str]] = defaultdict(list)
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"\b[Cc]ase (\d+)\b", ast.get_docstring(node) or ""):
                    found[int(number)].append(f"{file.name}::{node.name}")
    return found


def test_every_case_has_a_test_or_a_reason() -> None:
    covered = cases_of_tests()
    assert sorted(covered.keys() | OPEN.keys()) == list(range(1, LAST + 1))
    assert not covered.keys() & OPEN.keys(), "an open case has a test by now"
    assert all(OPEN.values())
