"""RESULTS.md: each benchmark writes between markers of its own; what stands around them stays."""

from __future__ import annotations

from pathlib import Path

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError

RESULTS = Path(__file__).with_name("RESULTS.md")
TITLE = "# Measured results"


def markers(name: str) -> tuple[str, str]:
    """The lines that a part of the file begins and ends with."""
    return f"<!-- {name} begin -->", f"<!-- {name} end -->"


def write_between(path: Path, name: str, introduction: str, body: str) -> None:
    """Put ``body`` between the markers of ``path``.

    Args:
        path: made where it is missing, of ``TITLE`` and ``introduction``.
        name: of the markers.
        introduction: a section with the markers in it.
        body: Markdown.

    Raises:
        CoverageError: a file without the markers.
    """
    begin, end = markers(name)
    text = path.read_text(encoding="utf-8") if path.exists() else f"{TITLE}\n\n{introduction}"
    if begin not in text or end not in text:
        raise CoverageError(f"{path} lacks the lines {begin} and {end}: put them where the tables belong")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    write_atomically(path, f"{before}{begin}\n\n{body}\n\n{end}{after}".encode())
