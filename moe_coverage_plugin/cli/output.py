"""Prints tables and facts, and writes JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.files.atomic import write_atomically

if TYPE_CHECKING:
    from moe_coverage_plugin.report.view import PlanView

LAYER_MARK = ".layers."


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table, with the first column flush left and the others flush right.

    Without tabulate, which is not installed in vLLM's environment.
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *rest)).rstrip())
    return "\n".join(lines)


def fact_lines(facts: Mapping[str, str]) -> str:
    """Format one fact per line, with values flush left."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in facts.items())


def percent(share: float | None) -> str:
    """Format ``74.0 %``, or a dash if the share is unknown."""
    return "-" if share is None else f"{100 * share:.1f} %"


def mebibytes(size: float) -> str:
    """Format ``5.72 MiB``."""
    return f"{size / 2**20:,.2f} MiB"


def layer_label(name: str) -> str:
    """Return the number of a layer, or its path if it has no number."""
    number = name.partition(LAYER_MARK)[2].partition(".")[0]
    return number or name


def provenance_facts(provenance: Any) -> dict[str, str]:
    """Return provenance as facts; the provenance of an untrusted file can be anything."""
    if not isinstance(provenance, Mapping):
        return {"provenance": _plain(provenance)}
    facts: dict[str, str] = {}
    for name, value in provenance.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            # a recipe: one fact per modifier
            for each in value:
                facts |= provenance_facts(each)
        elif isinstance(value, Mapping):
            facts[name] = ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
        else:
            facts[name] = _plain(value)
    return facts


def _plain(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else json.dumps(value)


def write_json(path: str, summary: Mapping[str, Any]) -> None:
    """Write a summary as JSON.

    Raises:
        CoverageError: the file cannot be written.
    """
    write_atomically(Path(path), (json.dumps(summary, indent=1) + "\n").encode())
    print(f"Wrote {path}")


def write_pictures(view: PlanView, directory: str) -> None:
    """Draw a plan.

    Raises:
        CoverageError: the files cannot be written.
    """
    # here, because matplotlib and jinja2 are not always installed in vLLM's environment
    from moe_coverage_plugin.report.page import write_report

    write_report(view, Path(directory))
    print(f"Wrote {directory}")
