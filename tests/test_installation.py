"""Messages, help and documentation name installations that work: the package is on no index.

Field case 2.19: what a message advised did not work in the environment it was printed in.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_coverage_plugin.installation import PLACE, how_to_install, install_command

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "moe_coverage_plugin"
FROM_AN_INDEX = re.compile(
    r"""pip3?\ install (?: \s+ -\S+)* \s+ ["']? moe[-_]coverage[-_]plugin (?! [-\w.]*\.whl)  # not the path of a wheel
    | moe[-_]coverage[-_]plugin\[""",
    re.VERBOSE,
)
EXTRAS = re.compile(r"\.(?:whl)?\[([\w,]+)\]\"")


def texts() -> Iterator[tuple[str, str]]:
    """Every string of the package, and all text that is not Python."""
    for path in PACKAGE.rglob("*.py"):
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        yield str(path.relative_to(REPOSITORY)), "\n".join(each for each in strings if isinstance(each, str))
    folders = (PACKAGE, *(REPOSITORY / name for name in ("docs", "recipes", "examples", "benchmarks")))
    for path in (REPOSITORY / "README.md", *(path for folder in folders for path in folder.rglob("*"))):
        if path.suffix in (".md", ".html", ".yaml", ".txt", ".jinja"):
            yield str(path.relative_to(REPOSITORY)), path.read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('pip install "moe-coverage-plugin[eval]"', True),
        ("serve/bin/pip install -U moe_coverage_plugin", True),
        ('use "moe-coverage-plugin[eval]"', True),
        ('pip install ".[eval]" in a clone of moe-coverage-plugin', False),
        ('pip install "./moe_coverage_plugin-0.1.0-py3-none-any.whl[eval]"', False),
        ("with moe-coverage-plugin installed", False),
    ],
)
def test_installations_from_an_index_are_found(text: str, found: bool) -> None:
    assert bool(FROM_AN_INDEX.search(text)) == found


def test_nothing_is_installed_from_an_index() -> None:
    assert [(name, match[0]) for name, text in texts() for match in FROM_AN_INDEX.finditer(text)] == []


def test_all_extras_exist() -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for _, text in texts() for match in EXTRAS.finditer(text) for extra in match[1].split(",")}
    calls = re.compile(r"(?:how_to_install|install_command)\(((?:['\"]\w+['\"](?:, )?)+)")
    for path in PACKAGE.rglob("*.py"):
        for match in calls.finditer(path.read_text()):
            named |= set(re.findall(r"\w+", match[1]))
    assert {"compress", "serve", "eval", "nf4", "finetune"} <= named <= set(known)


def test_the_command_is_that_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert install_command("compress", pip="compress/bin/pip") in readme
    assert how_to_install("eval") == f'pip install ".[eval]" {PLACE}; its wheel takes the same extra'
