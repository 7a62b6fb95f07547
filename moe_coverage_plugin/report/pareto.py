"""Held-out loss against checkpoint size: Pareto front, picture and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.document import data_uri, render
from moe_coverage_plugin.report.results import Repeated, ResultRow, mean_of_repetitions, read_results

__all__ = ["pareto_figure", "pareto_front", "read_results", "write_pareto"]


class Measured(Protocol):
    """A measurement with a size and a loss."""

    @property
    def bytes(self) -> float: ...

    @property
    def loss(self) -> float: ...


AnyMeasured = TypeVar("AnyMeasured", bound=Measured)


def pareto_front(rows: Sequence[AnyMeasured]) -> list[AnyMeasured]:
    """Select the Pareto front: no other row is at most as large, has at most the loss, and is better in one of both.

    Args:
        rows: in any order.

    Returns:
        Rows by rising size and falling loss; rows that are equal in both keep their order.
    """
    front: list[AnyMeasured] = []
    for row in sorted(rows, key=lambda row: (row.bytes, row.loss)):
        if not front or row.loss < front[-1].loss or (row.bytes, row.loss) == (front[-1].bytes, front[-1].loss):
            front.append(row)
    return front


def pareto_figure(rows: Sequence[ResultRow]) -> Figure:
    """Plot loss against size, with a colour and a marker for each method.

    Repetitions are shown as mean and standard deviation. Results on the front are named, except where one name would
    cover another.

    Args:
        rows: at least one.

    Returns:
        The figure.

    Raises:
        CoverageError: there are no rows.
    """
    if not rows:
        raise CoverageError("there are 0 results, but a picture needs at least 1: measure a checkpoint first")
    points = mean_of_repetitions(rows)
    front = pareto_front(points)
    unit, unit_name = size_unit(points)
    figure = style.new_figure(7.5, 5.0, "Held-out loss against size of the checkpoint")
    axes = figure.subplots()
    if max(point.bytes for point in points) / min(point.bytes for point in points) > 4:
        _use_log_sizes(axes)
    sizes = [point.bytes / unit for point in front]
    axes.step(sizes, [point.loss for point in front], where="post", color=style.FAINT, linewidth=1.2, zorder=1)
    methods = list(dict.fromkeys(point.method for point in points))
    handles = [
        _draw_method(axes, [point for point in points if point.method == method], index, unit)
        for index, method in enumerate(methods)
    ]
    style.value_grid(axes)
    style.style_axes(axes, f"size of the checkpoint [{unit_name}]", "held-out loss [nats per token]")
    handles.append(Line2D([], [], color=style.FAINT, linewidth=1.2))
    _legend(figure, handles, [*methods, "front: no result is smaller and better"])
    _place_names(figure, axes, [_name(axes, point, unit) for point in front])
    return figure


def size_unit(points: Sequence[Measured]) -> tuple[float, str]:
    """Choose GB for sizes from 10 GB, else MB; returns the bytes of the unit and its name."""
    return (1e9, "GB") if max(point.bytes for point in points) >= 1e10 else (1e6, "MB")


def _draw_method(axes: Axes, points: Sequence[Repeated], index: int, unit: float) -> Line2D:
    colour, marker = style.METHODS[index % len(style.METHODS)], style.MARKERS[index % len(style.MARKERS)]
    sizes, losses = [point.bytes / unit for point in points], [point.loss for point in points]
    (line,) = axes.plot(sizes, losses, marker, color=colour, markersize=6, zorder=3)
    line.set(markeredgecolor="white", markeredgewidth=0.6)
    for size, point in zip(sizes, points, strict=True):
        if point.count > 1:
            look = {"fmt": "none", "ecolor": colour, "elinewidth": 1, "capsize": 2.5, "zorder": 2}
            axes.errorbar(size, point.loss, point.spread, **look)
    return line


def _use_log_sizes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name(axes: Axes, point: Repeated, unit: float) -> Annotation:
    # no point is below and left of the front, so the name covers none there
    label = axes.annotate(
        style.wrapped(point.name, 2.0),
        (point.bytes / unit, point.loss),
        xytext=(-5, -5),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=style.CELL,
        color=style.INK,
    )
    style.plain(label)
    return label


def _place_names(figure: Figure, axes: Axes, labels: Sequence[Annotation]) -> None:
    """Widen the axes until every name is inside, and hide names that would cover others."""
    figure.draw_without_rendering()
    scale = axes.transScale
    lows, highs = (scale.transform(corner) for corner in zip(axes.get_xlim(), axes.get_ylim(), strict=True))
    for label in labels:
        box = label.get_window_extent()
        part = (np.array([box.width, box.height]) + 14) / (axes.bbox.width, axes.bbox.height)
        # the point must be at least this part of the axes above their lower end
        lows = np.minimum(lows, (scale.transform(label.xy) - part * highs) / (1 - part))
    corners = scale.inverted().transform([lows, highs])
    axes.set(xlim=corners[:, 0], ylim=corners[:, 1])
    shown: list[Bbox] = []
    for label in labels:
        box = label.get_window_extent()
        if any(box.overlaps(other) for other in shown):
            label.set_visible(False)
        else:
            shown.append(box)


def _legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str]) -> None:
    """Draw a legend below the axes, in as many columns as fit the figure, at most four."""
    for columns in (4, 3, 2, 1):
        # texts are set afterwards: a legend leaves out labels that begin with an underscore
        places = [str(index) for index in range(len(labels))]
        legend = figure.legend(handles, places, loc="outside lower center", ncols=columns, frameon=False)
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set(text=style.wrapped(label, 3.2), fontsize=style.TICK, parse_math=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def write_pareto(rows: Sequence[ResultRow], path: str | Path) -> None:
    """Write the picture as ``.png``, or the picture and a table of all results as a self-contained ``.html``.

    Args:
        rows: at least one.
        path: ends in ``.png`` or ``.html``.

    Raises:
        CoverageError: another suffix, no rows, or a file that cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise CoverageError(f"{path} ends in {path.suffix!r}, but this writes .png or .html: choose one of them")
    picture = style.png(pareto_figure(rows))
    if path.suffix == ".png":
        write_atomically(path, picture)
        return
    points = mean_of_repetitions(rows)
    unit, unit_name = size_unit(points)
    optional = ("model", "sparsity", "bits")
    page = render(
        "pareto.html",
        scripts=["tables.js"],
        picture=data_uri(picture),
        points=points,
        front=pareto_front(points),
        unit=unit,
        unit_name=unit_name,
        optional=[key for key in optional if any(getattr(point, key) is not None for point in points)],
    )
    write_atomically(path, page.encode())
