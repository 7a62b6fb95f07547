"""Writes sections of RESULTS.md: each benchmark between its own markers; other text is unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError

RESULTS = Path(__file__).with_name("RESULTS.md")
TITLE = "# Measured results"


def markers(name: str) -> tuple[str, str]:
    """Return the first and the last line of a section."""
    return f"<!-- {name} begin -->", f"<!-- {name} end -->"


def write_between(path: Path, name: str, introduction: str, body: str) -> None:
    """Put ``body`` between the markers of ``path``.

    Args:
        path: file; by default, written with ``TITLE`` and ``introduction``.
        name: name of the markers.
        introduction: section with the markers.
        body: Markdown.

    Raises:
        CoverageError: the file does not have the markers.
    """
    begin, end = markers(name)
    text = path.read_text(encoding="utf-8") if path.exists() else f"{TITLE}\n\n{introduction}"
    if begin not in text or end not in text:
        raise CoverageError(f"{path} lacks the lines {begin} and {end}: put them where the tables belong")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    write_atomically(path, f"{before}{begin}\n\n{body}\n\n{end}{after}".encode())


def write_sections(
    path: Path, name: str, introduction: str, files: Sequence[Path], section: Callable[[dict[str, Any]], str]
) -> None:
    """Put what ``section`` makes of the JSON object in each file between the markers of ``path``.

    Raises:
        CoverageError: the file does not have the markers.
    """
    bodies = (section(json.loads(file.read_text(encoding="utf-8"))) for file in files)
    write_between(path, name, introduction, "\n\n".join(bodies))
