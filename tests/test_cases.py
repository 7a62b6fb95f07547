"""Every case, a numbered failure of other tools, is named in the docstring of a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

# numbers from 1 on, in the order in which they were collected from public trackers
LAST = 31
# cases without a test, with the reason, by number
OPEN: dict[int, str] = {}


def cases_of_tests() -> dict[int, list[str]]:
    """Return the tests whose docstrings name a case, by its number."""
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
    assert not covered.keys() & OPEN.keys(), "a case that is listed as open has a test"
    assert all(OPEN.values())
