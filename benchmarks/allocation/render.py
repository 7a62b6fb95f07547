"""Writes the section of RESULTS.md about allocation from measured rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.allocation.equal_bytes import lost_to_other_bits, lost_to_same_bits
from benchmarks.allocation.rows import Row, read_rows
from benchmarks.allocation.tables import RECOMMENDED, TITLES, UNPRUNED, settings
from benchmarks.markers import markers, write_between
from moe_coverage_plugin.manifest import CoverageError

NAME = "tables"
BEGIN, END = markers(NAME)
FAILED = "error"
"""Cell of a row that could not be measured."""

INTRODUCTION = f"""## Loss of methods that allocate channels

Written by `python -m benchmarks.allocation --render`. Every row is one run of the toolkit on a fresh copy of the
model, measured in memory. MB are millions of bytes of the checkpoint that the row would be saved as, with 16 bits per
weight that is not quantized, whatever dtype was used to compute. Loss is in nats per token inside windows, the mean
over the texts; rise is the difference to the unpruned model. Divergence is the mean Kullback-Leibler divergence of the
predictions from those of the unpruned model, in nats per token; rows measured before it was have none.

{BEGIN}
{END}
"""


@dataclass(frozen=True)
class Entry:
    """Rows of one setting with different seeds."""

    rows: list[Row]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.loss is not None]

    def losses(self, base: float = 0.0) -> list[float]:
        """Losses of the measured rows minus ``base``."""
        return [row.loss - base for row in self.rows if row.loss is not None]

    def divergences(self) -> list[float]:
        """Means over the texts of the rows that have them."""
        return [_mean(row.divergences.values()) for row in self.measured if row.divergences]

    @property
    def megabytes(self) -> str:
        if not self.measured:
            return ""
        dense = _mean(row.bytes for row in self.measured)
        sparse = [row.sparse_bytes for row in self.measured if row.sparse_bytes is not None]
        return f"{dense / 1e6:.2f} ({_mean(sparse) / 1e6:.2f})" if sparse else f"{dense / 1e6:.2f}"


def write_results(files: Sequence[Path], path: Path) -> None:
    """Write the tables of the files' rows between the markers of ``path``; other text is unchanged.

    Raises:
        CoverageError: if there are no rows, rows cannot be compared, or the file has no markers.
    """
    rows = [row for file in files for row in read_rows(file)]
    if not rows:
        raise CoverageError(f"{', '.join(map(str, files))}: no rows, measure first")
    models = dict.fromkeys(row.model for row in rows)
    sections = [section([row for row in rows if row.model == model]) for model in models]
    write_between(path, NAME, INTRODUCTION, "\n\n".join(sections))


def section(rows: Sequence[Row]) -> str:
    """Settings and tables of one model as Markdown."""
    base = _base(rows)
    parts = [f"### {rows[0].model}", _head(rows, base)]
    for key, (title, note) in TITLES.items():
        entries = _entries([row for row in rows if row.table == key])
        if not entries or key == UNPRUNED:
            continue
        match key:
            case "strategies":
                body = _strategies(entries, base)
            case "sweep":
                body = _sweep(entries, base)
            case "own":
                body = _by_text(entries, rows)
            case _:
                body = _table(entries, base)
        parts += [f"#### {title}", *([note] if note else []), body, *_errors(entries)]
    return "\n\n".join(parts)


def _base(rows: Sequence[Row]) -> float:
    if len({(row.evaluation_sha256, row.dtype) for row in rows}) > 1:
        raise CoverageError(
            f"rows of {rows[0].model!r} were measured on several evaluation texts or in several dtypes: their losses "
            "cannot be compared, so give the models different names"
        )
    found = [row.loss for row in rows if row.table == UNPRUNED and row.loss is not None]
    if not found:
        raise CoverageError(f"no row has the loss of the unpruned model of {rows[0].model!r}: measure it")
    return found[0]


def _head(rows: Sequence[Row], base: float) -> str:
    first = next(row for row in rows if row.table == UNPRUNED)
    each = ", ".join(f"{name} {loss:.4f}" for name, loss in (first.losses or {}).items())
    calibration = _unique(
        row.calibration.rpartition(", seed")[0] for row in rows if row.table not in ("corpora", "own")
    )
    seeds = sorted({row.seed for row in rows})
    lines = [
        f"Unpruned: {first.bytes / 1e6 if first.bytes else 0:.2f} MB, loss {base:.4f} ({each}).",
        f"Calibrated on {'; '.join(calibration)}; drawn again with each of the seeds "
        f"{', '.join(map(str, seeds))}. Cells are means, with standard deviations if there are several seeds.",
        f"Measured on {'; '.join(_unique(row.evaluation for row in rows))}; in {first.dtype}.",
        f"Machine: {'; '.join(_unique(row.device for row in rows))}.",
        f"Versions: {'; '.join(_unique(_versions(row) for row in rows))}.",
        *(f"Command: `{command}`" for command in _unique(row.command for row in rows)),
        f"{len(rows)} rows, {sum(row.seconds for row in rows) / 60:.0f} minutes without scoring.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _versions(row: Row) -> str:
    return ", ".join(f"{package} {version}" for package, version in row.versions.items())


def _entries(rows: Iterable[Row]) -> list[Entry]:
    groups: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.name, row.sparsity, row.bits), []).append(row)
    # workers finish rows in any order; names of the corpora are those of the run, so their rows stay as they are
    order = {(each.table, each.name): position for position, each in enumerate(settings(corpora=()))}

    def position(entry: Entry) -> tuple[int, float, int]:
        first = entry.first
        return -first.bits, first.sparsity, order.get((first.table, first.name), len(order))

    return sorted(map(Entry, groups.values()), key=position)


def _table(entries: Sequence[Entry], base: float) -> str:
    cells = [
        (
            entry.first.name,
            _percent(entry.first.sparsity),
            str(entry.first.bits),
            entry.megabytes,
            _spread(entry.losses(), ".4f") or FAILED,
            _spread(entry.losses(base), "+.4f"),
        )
        for entry in entries
    ]
    return _markdown(cells, ("name", "sparsity", "bits", "MB", "loss", "rise"))


def _by_text(entries: Sequence[Entry], rows: Sequence[Row]) -> str:
    """Rises of the loss of each text and of the mean, and the mean divergence."""
    unpruned = next(row for row in rows if row.table == UNPRUNED and row.losses)
    texts = unpruned.losses or {}
    diverges = any(entry.divergences() for entry in entries)
    cells = [
        (
            entry.first.name,
            _percent(entry.first.sparsity),
            str(entry.first.bits),
            entry.megabytes,
            _spread(entry.losses(unpruned.loss or 0.0), "+.4f") or FAILED,
            *(
                _spread([(row.losses or {})[text] - base for row in entry.measured], "+.4f")
                for text, base in texts.items()
            ),
            *[_spread(entry.divergences(), ".4f")] * diverges,
        )
        for entry in entries
    ]
    return _markdown(cells, ("name", "sparsity", "bits", "MB", "rise", *texts, *["divergence"] * diverges))


def _strategies(entries: Sequence[Entry], base: float) -> str:
    parts: list[str] = []
    for sparsity in sorted({entry.first.sparsity for entry in entries}):
        chosen = {tuple(e.first.name.split(" / ")): e for e in entries if e.first.sparsity == sparsity}
        outer, inner = _unique(name[0] for name in chosen), _unique(name[1] for name in chosen)
        cells = [(row, *(_rise(chosen.get((row, column)), base) for column in inner)) for row in outer]
        sizes = _unique(entry.megabytes for entry in chosen.values() if entry.measured)
        parts.append(f"{_percent(sparsity)}, {' to '.join(dict.fromkeys((min(sizes), max(sizes))))} MB:")
        parts.append(_markdown(cells, ("", *inner)))
    return "\n\n".join(parts)


def _sweep(entries: Sequence[Entry], base: float) -> str:
    parts = ["Rise of the loss, and MB in brackets; for Wanda, MB of an ideal sparse file."]
    sparsities = sorted({entry.first.sparsity for entry in entries} - {0.0})
    for bits in sorted({entry.first.bits for entry in entries}, reverse=True):
        chosen = {(e.first.name, e.first.sparsity): e for e in entries if e.first.bits == bits}
        methods = [name for name in _unique(name for name, _ in chosen) if name != UNPRUNED]
        cells = [(name, *(_sized(chosen.get((name, p)), base) for p in sparsities)) for name in methods]
        parts.append(f"{bits} bits; all channels: {_sized(chosen.get((UNPRUNED, 0.0)), base)}")
        parts.append(_markdown(cells, ("", *map(_percent, sparsities))))
    rows = [row for entry in entries for row in entry.measured]
    for ours in (method for method in RECOMMENDED if any(row.method == method for row in rows)):
        parts.append(
            f"**Baselines with a lower loss than `{ours}` at equal bytes and bits** (first the loss of the "
            f"baseline, then that of `{ours}`, interpolated linearly between two measured sizes, which "
            "overestimates a convex curve):"
        )
        parts.append(_list(lost_to_same_bits(rows, ours)))
        parts.append(
            f"Rows of `{ours}` for which a baseline with another number of bits is not larger and has a lower loss:"
        )
        parts.append(_list(lost_to_other_bits(rows, ours)))
    return "\n\n".join(parts)


def _errors(entries: Sequence[Entry]) -> list[str]:
    """Rows that could not be measured, by their error message."""
    by_message: dict[str, list[str]] = {}
    for entry in entries:
        for row in entry.rows:
            if row.refusal is not None:
                label = f"{row.name}, {_percent(row.sparsity)}, {row.bits} bits, seed {row.seed}"
                by_message.setdefault(row.refusal, []).append(label)
    if not by_message:
        return []
    return ["Errors:", _list(f"{'; '.join(labels)}: {message}" for message, labels in by_message.items())]


def _rise(entry: Entry | None, base: float) -> str:
    if entry is None:
        return ""
    return _spread(entry.losses(base), "+.4f") or FAILED


def _sized(entry: Entry | None, base: float) -> str:
    if entry is None or not entry.measured:
        return _rise(entry, base)
    size = _mean(row.sparse_bytes or row.bytes for row in entry.measured)
    return f"{_rise(entry, base)} ({size / 1e6:.2f})"


def _spread(values: Sequence[float], form: str) -> str:
    """Mean, and the sample standard deviation if there are several values."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "- none"


def _markdown(cells: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    aligned = ("left", *["right"] * (len(headers) - 1))
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}".replace("%", " %")


def _mean(values: Iterable[float | None]) -> float:
    return statistics.mean(value for value in values if value is not None)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
