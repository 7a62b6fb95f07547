"""Finds baselines that are better than a method at equal bytes; the means over seeds are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.allocation.rows import Row
from benchmarks.allocation.tables import RECOMMENDED, UNPRUNED


@dataclass(frozen=True)
class Point:
    """Means of one setting over its seeds.

    Attributes:
        method: name of the method.
        sparsity: removed fraction.
        bits: bits of a weight.
        bytes: bytes of the checkpoint, or of an ideal sparse one if ``sparse``.
        loss: loss in nats.
        sparse: whether zeros are unstructured.
    """

    method: str
    sparsity: float
    bits: int
    bytes: float
    loss: float
    sparse: bool

    @property
    def label(self) -> str:
        sparsity = "" if self.method == UNPRUNED else f" {self.sparsity:.0%}".replace("%", " %")
        ideal = ", ideally sparse" if self.sparse else ""
        return f"{self.method}{sparsity} x {self.bits} bits ({self.bytes / 1e6:.2f} MB{ideal})"


def lost_to_same_bits(rows: Sequence[Row], method: str) -> list[str]:
    """Describe each baseline with a lower loss than ``method`` at the same bytes and the same bits per weight.

    The loss of ``method`` is interpolated linearly between its measured sizes, which include the unpruned model.
    Unstructured zeros count as ideal sparse bytes, which favours the baseline.
    """
    lines: list[str] = []
    points = _points(rows)
    for bits in sorted({point.bits for point in points}, reverse=True):
        same = [point for point in points if point.bits == bits]
        curve = sorted((point.bytes, point.loss) for point in same if point.method in (method, UNPRUNED))
        if not curve:  # the comparison was interrupted before the method was measured
            continue
        sizes, losses = zip(*curve, strict=True)
        for point in same:
            if point.method in (*RECOMMENDED, UNPRUNED):
                continue
            ours = float(np.interp(point.bytes, sizes, losses))
            if ours > point.loss:
                lines.append(f"{point.label}: {point.loss:.4f} against {ours:.4f}")
    return lines


def lost_to_other_bits(rows: Sequence[Row], method: str) -> list[str]:
    """Describe each size of ``method`` for which a baseline with other bits is not larger and has a lower loss.

    If there are several such baselines, the one with the lowest loss is named.
    """
    lines: list[str] = []
    points = _points(rows)
    for ours in (point for point in points if point.method == method):
        better = [
            point
            for point in points
            if point.bits != ours.bits
            and point.method not in RECOMMENDED
            and point.bytes <= ours.bytes
            and point.loss < ours.loss
        ]
        if better:
            best = min(better, key=lambda point: point.loss)
            lines.append(f"{ours.label}, {ours.loss:.4f}: {best.label}, {best.loss:.4f}")
    return lines


def _points(rows: Sequence[Row]) -> list[Point]:
    groups: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.sparsity, row.bits), []).append(row)
    points: list[Point] = []
    for group in groups.values():
        first = group[0]
        size, loss = statistics.mean(map(_size, group)), statistics.mean(map(_loss, group))
        points.append(Point(first.method, first.sparsity, first.bits, size, loss, first.sparse_bytes is not None))
    return points


def _size(row: Row) -> int:
    size = row.sparse_bytes or row.bytes
    assert size is not None, "only measured rows are compared"
    return size


def _loss(row: Row) -> float:
    assert row.loss is not None, "only measured rows are compared"
    return row.loss
