"""Compares several results in one table, with changes relative to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_coverage_plugin.evaluation.results import Results, describe_differences, differing
from moe_coverage_plugin.manifest import CoverageError

UNKNOWN = "-"
# settings that may differ between columns; they are printed above the table
MAY_DIFFER = ("backend", "dtype")


def compare(results: Mapping[str, Results]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: bytes first, then each metric of each task, with the change from the first column.

    Args:
        results: results by the name of the column.

    Raises:
        CoverageError: columns differ in the prompts, documents or examples of a task.
    """
    columns = list(results.values())
    first = columns[0]
    for name, other in list(results.items())[1:]:
        _check_comparable(first, other, name)
    headers = ["task", next(iter(results))]
    for name in list(results)[1:]:
        headers += [name, "change"]
    rows = [_row("weights, MiB", [_mebibytes(column) for column in columns], _ratios(columns))]
    tasks = list(dict.fromkeys(task for column in columns for task in column.tasks))
    for task in tasks:
        found = [column.tasks.get(task, {}).get("metrics", {}) for column in columns]
        for metric in dict.fromkeys(metric for metrics in found for metric in metrics):
            values = [metrics.get(metric) for metrics in found]
            changes = [_change(values[0], value) for value in values[1:]]
            rows.append(_row(f"{task} {metric}{_arrow(values)}", [_figure(value) for value in values], changes))
    return headers, rows


def _check_comparable(first: Results, other: Results, name: str) -> None:
    for task in first.tasks.keys() & other.tasks.keys():
        changed = differing(first.tasks[task]["settings"], other.tasks[task]["settings"])
        changed = {setting: values for setting, values in changed.items() if setting not in MAY_DIFFER}
        if changed:
            raise CoverageError(
                f"{task} was run with {describe_differences(changed)} in {name}: such numbers cannot be compared"
            )


def _row(label: str, values: Sequence[str], changes: Sequence[str]) -> list[str]:
    row = [label, values[0]]
    for value, change in zip(values[1:], changes, strict=True):
        row += [value, change]
    return row


def _mebibytes(results: Results) -> str:
    return f"{results.weight_bytes / 2**20:,.2f}"


def _ratios(columns: Sequence[Results]) -> list[str]:
    return [f"{100 * (column.weight_bytes / columns[0].weight_bytes - 1):+.1f} %" for column in columns[1:]]


def _figure(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return UNKNOWN
    return f"{found['value']:.4f}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.4f}")


def _change(first: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    return UNKNOWN if first is None or other is None else f"{other['value'] - first['value']:+.4f}"


def _arrow(values: Sequence[Mapping[str, Any] | None]) -> str:
    better = next((value["higher_is_better"] for value in values if value is not None), None)
    return "" if better is None else " ↑" if better else " ↓"
