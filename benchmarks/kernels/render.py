"""Writes the section of RESULTS.md about kernels from measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate  # pyright: ignore[reportMissingModuleSource]  # not in vLLM's environment

from benchmarks.kernels.rows import Row, read_rows
from benchmarks.kernels.shapes import SHAPES
from benchmarks.markers import markers, write_between
from moe_coverage_plugin.manifest import CoverageError

NAME = "kernels"
BEGIN, END = markers(NAME)
INTRODUCTION = f"""## Time of our kernels over that of vLLM's

Written by `python -m benchmarks.kernels --render`. A cell is the time of our layer divided by the time of vLLM's, and
in brackets the time of ours in microseconds. Below 1, ours is faster.

{BEGIN}
{END}
"""
TITLES = {4: "W4A16, groups of 128", 8: "FP8_DYNAMIC", 16: "bfloat16"}
METHOD = (
    "Method: our layer has experts of unequal width, in multiples of 128; vLLM's fused MoE has experts of one width, "
    "with as many channels in total and the same routing. vLLM's kernels are Marlin for 4 bits, Triton for 16 bits "
    "(with its own choice of tiles or with those tuned for the unpruned width), and these or CUTLASS for 8 bits; of "
    "several, the fastest is compared. Each layer's calls, all with different hidden states and routing, are captured "
    "in one CUDA graph. They use copies of the weights in turn, so that a copy is read again only after four times "
    "the size of the L2 cache. The graphs are replayed alternately, and the medians of their times are divided."
)


def write_results(files: Sequence[Path], path: Path) -> None:
    """Write the tables of the files' rows between the markers of ``path``.

    Raises:
        CoverageError: if a file is missing, there are no rows, or the page has no markers.
    """
    missing = [str(file) for file in files if not file.exists()]
    rows = [] if missing else read_rows(files)
    if not rows:
        raise CoverageError(f"{', '.join(missing or map(str, files))}: no rows, measure first")
    write_between(path, NAME, INTRODUCTION, section(rows))


def section(rows: Sequence[Row]) -> str:
    """The method, and for each card and versions of packages the settings and one table per number of bits."""
    widths = {row.shape: f"{row.shape} {row.width} of {row.channels}" for row in rows}
    parts = [_list([METHOD, f"Mean widths: {'; '.join(widths.values())}."])]
    for stack in dict.fromkeys(row.stack for row in rows):
        of_stack = [row for row in rows if row.stack == stack]
        parts += [f"### {_heading(of_stack[0])}", _settings(of_stack)]
        for bits in sorted({row.bits for row in of_stack}):
            parts += [f"#### {TITLES[bits]}", _table([row for row in of_stack if row.bits == bits])]
    failed = [row for row in rows if row.stock_us is None]
    if failed:
        by_error: dict[str, list[str]] = {}
        for row in failed:
            name = f"{_heading(row)}, {row.shape}, {row.bits} bits, {row.tokens} tokens"
            by_error.setdefault(str(row.stock_error), []).append(name)
        lines = [f"{'; '.join(names)}: {error}" for error, names in by_error.items()]
        parts += ["vLLM's layer failed for cells without a ratio:", _list(lines)]
    return "\n\n".join(parts)


def _heading(row: Row) -> str:
    return f"{row.card}, vLLM {row.versions['vllm']}" if "vllm" in row.versions else row.card


def _settings(rows: Sequence[Row]) -> str:
    lines = [
        f"Versions: {rows[0].stack[1]}.",
        *(f"Command: `{command}`" for command in _unique(row.command for row in rows)),
        f"Seed: {', '.join(_unique(str(row.seed) for row in rows))}.",
    ]
    differences: dict[int, float] = {}
    for row in rows:
        if row.difference is not None:
            differences[row.bits] = max(row.difference, differences.get(row.bits, 0))
    if differences:
        by_bits = "; ".join(f"{TITLES[bits]} {differences[bits]:.4f}" for bits in sorted(differences))
        lines.append(f"Largest relative difference of outputs, on one layer of equal widths and 64 tokens: {by_bits}.")
    return _list(lines)


def _table(rows: Sequence[Row]) -> str:
    found = {row.shape for row in rows}
    names = [shape.name for shape in SHAPES if shape.name in found]
    cells = {(row.tokens, row.shape): _cell(row) for row in rows}
    tokens = sorted({row.tokens for row in rows})
    lines = [(str(count), *(cells.get((count, name), "") for name in names)) for count in tokens]
    headers = ("tokens", *names)
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=["right"] * len(headers))


def _cell(row: Row) -> str:
    return f"{'failed' if row.ratio is None else format(row.ratio, '.2f')} ({row.ours_us:.1f})"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
