"""The look of pictures: colours, type sizes, and figures without global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

# evenly spaced in lightness, and the same for all kinds of colour vision
SEQUENTIAL: Colormap = matplotlib.colormaps["cividis"]
# Okabe and Ito's colours without yellow, which has too little contrast on white
REMOVED = "#d55e00"
METHODS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
INK = "#222222"
FAINT = "#8a8a8a"

TITLE, LABEL, TICK, CELL = 9.5, 8.5, 7.5, 7.0
DPI = 160


def new_figure(width: float, height: float, title: str) -> Figure:
    """Make an empty figure with its own canvas.

    Args:
        width: in inches.
        height: in inches.
        title: wrapped to the width.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    plain(figure.suptitle(wrapped(title, width), fontsize=TITLE, color=INK))
    return figure


def png(figure: Figure) -> bytes:
    """Draw a figure of :func:`new_figure` as PNG."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    buffer = io.BytesIO()
    # ``savefig`` would draw twice, the first time for the layout only, which this call computes as well
    figure.canvas.print_png(buffer)
    return buffer.getvalue()


def style_axes(axes: Axes, x: str = "", y: str = "") -> None:
    """Set small ticks, a thin frame, and the labels of the axes."""
    axes.tick_params(which="major", labelsize=TICK, width=0.6, length=2.5, colors=INK)
    axes.tick_params(which="minor", width=0.4, length=1.5, colors=INK)
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=FAINT)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)


def value_grid(axes: Axes) -> None:
    """Draw a light grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(color="#e2e2e2", linewidth=0.6)


def separate_cells(axes: Axes, columns: int, rows: int) -> None:
    """Draw white lines between the cells of an image."""
    line = {"color": "white", "linewidth": 0.4}
    axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, **line)
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, **line)


def plain(text: Text) -> Text:
    """Keep matplotlib from reading a user's dollar signs as formulas."""
    text.set_parse_math(False)
    return text


def wrapped(text: str, width: float) -> str:
    """Break a text into at most three lines that fit ``width`` inches at the size of titles."""
    drawable = text.encode(errors="replace").decode()  # JSON can contain lone surrogates, which fonts cannot draw
    return "\n".join(textwrap.wrap(drawable, max(20, int(width * 12)), max_lines=3, placeholder=" …"))


def css_colours(steps: int, first: float = 0.0) -> list[str]:
    """List ``steps`` colours of the sequential map from position ``first`` in [0, 1] to 1, in CSS notation."""
    return [to_hex(colour) for colour in SEQUENTIAL(np.linspace(first, 1, steps))]


def ink_on(position: float) -> str:
    """Choose black or white for text on the sequential map at ``position`` in [0, 1], by contrast (WCAG 2)."""
    red, green, blue = ((part + 0.055) ** 2.4 / 1.055**2.4 for part in SEQUENTIAL(float(position))[:3])
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


def sparse_ticks(count: int, most: int) -> Sequence[int]:
    """Choose at most ``most`` evenly spaced indices out of ``count``, with a round step."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 128, count) if -(-count // step) <= most)
    return range(0, count, step)
