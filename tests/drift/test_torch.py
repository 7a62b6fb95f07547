"""The oldest PyTorch that pyproject.toml allows has everything that the package uses; CI runs the newest only."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.utils.checkpoint  # some names of the package are in modules that torch imports on demand

from .check import PACKAGE, REPOSITORY

VERIFIED = Path(__file__).with_name("torch_names.txt")
"""Names that were looked up in the release of the first line."""


def used_names(path: Path) -> Iterator[str]:
    """Dotted names below ``torch`` in a module, such as ``torch.cuda.mem_get_info``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", dotted):
                yield dotted


def every_name() -> set[str]:
    """All names except operators, which libraries register."""
    names = {name for path in PACKAGE.rglob("*.py") for name in used_names(path)}
    return {name for name in names if not name.startswith("torch.ops.")}


def test_names_are_in_the_oldest_release():
    release, *verified = VERIFIED.read_text(encoding="utf-8").split()
    allowed = re.search(r'"torch>=([\d.]+),', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert allowed is not None
    assert allowed[1] == release, f"look up the names of {VERIFIED.name} in torch {allowed[1]}"
    unknown = sorted(every_name() - set(verified))
    assert not unknown, f"look up whether torch {release} has these, and add them to {VERIFIED.name}: {unknown}"


def test_names_are_in_the_installed_release():
    # the package asks before it uses these
    optional = {"torch._C._host_emptyCache"}
    missing = []
    for name in sorted(every_name() - optional):
        try:
            operator.attrgetter(name.removeprefix("torch."))(torch)
        except AttributeError:
            missing.append(name)
    assert not missing
