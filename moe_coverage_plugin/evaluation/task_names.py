"""Finds unknown names of tasks by the text of lm-eval's task files: its index of them takes ten seconds and more."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from moe_coverage_plugin.manifest import CoverageError

# YAML can write these in other ways: escaped, doubled or as the end of a line
_WRITTEN_OTHERWISE = re.compile(r"""[^!-~]|["'/\\]""")
_TO_WORDS = bytes(code if re.match(rb"[\w.-]", bytes([code])) else ord(" ") for code in range(256))
# task files are YAML, and include files with any suffix
_OTHER_SUFFIXES = (".py", ".pyc", ".md")
_COMMENT = re.compile(rb"(?:^|[ \t])#.*$", re.MULTILINE)
_KEY = re.compile(rb"""^["']?(?:task|group|tag)["']?[ \t]*:([^\n:]*(?:\n[ \t]*-[ \t][^\n:]*$)*)""", re.MULTILINE)
_SEPARATOR = re.compile(rb"[\n\[\],]|^\s*-\s", re.MULTILINE)


def check_names(names: Iterable[str]) -> None:
    """Check that names can be tasks, groups or tags of the installed lm-eval, without importing it.

    A name that passes can still be unknown: its characters are somewhere in the task files.

    Raises:
        CoverageError: a name is in no task file.
    """
    spec = find_spec("lm_eval")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        return
    folder = Path(folders[0], "tasks")
    for name in names:
        if not (_WRITTEN_OTHERWISE.search(name) or occurs(name, folder)):
            raise unknown_task(name, defined_names(folder))


def unknown_task(name: str, known: Collection[str]) -> CoverageError:
    """Return the error for a name that is not among the known ones."""
    near = get_close_matches(name, known, n=4)
    hint = f", similar names are {', '.join(near)}" if near else ""
    return CoverageError(f"lm-eval has no task {name!r}{hint}: `lm-eval ls tasks` lists all")


def occurs(name: str, folder: Path) -> bool:
    """Return whether the task files in a folder have a name, as entire words."""
    encoded = name.encode()
    found = bool(name) and encoded in _text(folder)
    return found and _words(folder).issuperset(encoded.translate(_TO_WORDS).split())


def defined_names(folder: Path) -> list[str]:
    """Return the values of ``task``, ``group`` and ``tag`` in the task files in a folder; a few are not registered."""
    values = _KEY.findall(_COMMENT.sub(b"", _text(folder)))
    found = {each.strip().strip(b"\"'") for value in values for each in _SEPARATOR.split(value)}
    return sorted(name.decode(errors="replace") for name in found if name)


@cache
def _text(folder: Path) -> bytes:
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in sorted(names))
    return b"\n".join(file.read_bytes() for file in files if file.suffix not in _OTHER_SUFFIXES)


@cache
def _words(folder: Path) -> frozenset[bytes]:
    return frozenset(_text(folder).translate(_TO_WORDS).split())
