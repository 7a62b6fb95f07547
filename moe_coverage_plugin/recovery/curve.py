"""The loss curve of a fine-tuning: points, their file and their picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.report import style

CURVE_NAME = "moe_coverage_recovery.jsonl"
PICTURE_NAME = "moe_coverage_recovery.png"

# ``step``, and either ``held_out`` or ``train``: mean next-token losses in nats; all keys: :meth:`Training.run`
Point = dict[str, Any]


def write_points(directory: Path, points: list[Point]) -> None:
    """Write the points as JSON lines into a directory."""
    lines = "".join(json.dumps(point) + "\n" for point in points)
    write_atomically(directory / CURVE_NAME, lines.encode())


def draw_points(directory: Path, points: list[Point]) -> None:
    """Write the picture of the curve into a directory."""
    write_atomically(directory / PICTURE_NAME, style.png(curve_figure(points)))


def curve_figure(points: list[Point]) -> Figure:
    """Plot the loss on the training text at each step, and on held-out text."""
    figure = style.new_figure(6.5, 3.6, "Recovery by fine-tuning")
    axes = figure.subplots()
    looks = {
        "train": {"color": style.FAINT, "linewidth": 0.7},
        "held_out": {"color": style.METHODS[0], "linewidth": 1.3, "marker": "o", "markersize": 3},
    }
    for name, label in (("train", "training text"), ("held_out", "held-out text")):
        chosen = [point for point in points if name in point]
        axes.plot([p["step"] for p in chosen], [p[name] for p in chosen], label=label, **looks[name])
    style.value_grid(axes)
    style.style_axes(axes, "step", "loss [nats per token]")
    axes.legend(fontsize=style.TICK, frameon=False)
    return figure
