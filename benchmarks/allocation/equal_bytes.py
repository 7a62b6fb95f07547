"""Where a method is not the best at its size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.allocation.rows import Row
from benchmarks.allocation.tables import RECOMMENDED, UNPRUNED


def lost_to_same_bits(rows: Sequence[Row], method: str) -> list[str]:
    """Every baseline row whose loss is below that of ``method`` at as many bytes and bits, in words.

    Between its measured sizes, the unpruned model among them, the loss of ``method`` is interpolated. Unstructured
    zeros count as ideal sparse bytes, in favour of the baseline.
    """
    lines: list[str] = []
    for bits in sorted({row.bits for row in rows}, reverse=True):
        curve = sorted(
            (_size(row), _loss(row)) for row in rows if row.bits == bits and row.method in (method, UNPRUNED)
        )
        if not curve:  # a comparison that was stopped before it came to the method
            continue
        sizes, losses = zip(*curve, strict=True)
        for row in rows:
            if row.bits != bits or row.method in (*RECOMMENDED, UNPRUNED):
                continue
            ours = float(np.interp(_size(row), sizes, losses))
            if ours > _loss(row):
                lines.append(f"{_label(row)}: {_loss(row):.4f} against {ours:.4f}")
    return lines


def lost_to_other_bits(rows: Sequence[Row], method: str) -> list[str]:
    """Every row of ``method`` for which a baseline of other bits is no larger and loses less; the best, in words."""
    lines: list[str] = []
    for ours in (row for row in rows if row.method == method):
        better = [
            row
            for row in rows
            if row.bits != ours.bits
            and row.method not in RECOMMENDED
            and _size(row) <= _size(ours)
            and _loss(row) < _loss(ours)
        ]
        if better:
            best = min(better, key=_loss)
            lines.append(f"{_label(ours)}, {_loss(ours):.4f}: {_label(best)}, {_loss(best):.4f}")
    return lines


def _label(row: Row) -> str:
    sparsity = "" if row.method == UNPRUNED else f" {row.sparsity:.0%}".replace("%", " %")
    ideal = ", ideally sparse" if row.sparse_bytes is not None else ""
    return f"{row.method}{sparsity} x {row.bits} bits ({_size(row) / 1e6:.2f} MB{ideal})"


def _size(row: Row) -> int:
    size = row.sparse_bytes or row.bytes
    assert size is not None, "only measured rows are compared"
    return size


def _loss(row: Row) -> float:
    assert row.loss is not None, "only measured rows are compared"
    return row.loss
