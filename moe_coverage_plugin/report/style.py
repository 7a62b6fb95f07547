"""How pictures look: one place for colours, type sizes and figures without global state."""

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

# even in lightness, and alike for all kinds of colour vision
SEQUENTIAL: Colormap = matplotlib.colormaps["cividis"]
# Okabe and Ito's colours, without the yellow that white paper swallows
REMOVED = "#d55e00"
METHODS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
INK = "#222222"
FAINT = "#8a8a8a"

TITLE, LABEL, TICK, CELL = 9.5, 8.5, 7.5, 7.0
DPI = 160


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with its own canvas; sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    plain(figure.suptitle(wrapped(title, width), fontsize=TITLE, color=INK))
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def style_axes(axes: Axes, x: str = "", y: str = "") -> None:
    """Small ticks, a thin frame, and labels of the axes."""
    axes.tick_params(which="major", labelsize=TICK, width=0.6, length=2.5, colors=INK)
    axes.tick_params(which="minor", width=0.4, length=1.5, colors=INK)
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=FAINT)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)


def value_grid(axes: Axes) -> None:
    """Lines behind the data where values are read off."""
    axes.set_axisbelow(True)
    axes.grid(color="#e2e2e2", linewidth=0.6)


def separate_cells(axes: Axes, columns: int, rows: int) -> None:
    """White lines between the cells of an image."""
    line = {"color": "white", "linewidth": 0.4}
    axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, **line)
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, **line)


def plain(text: Text) -> Text:
    """Keep matplotlib from reading a user's dollar signs as formulas."""
    text.set_parse_math(False)
    return text


def wrapped(text: str, width: float) -> str:
    """At most three lines that fit ``width`` inches at the size of titles."""
    drawable = text.encode(errors="replace").decode()  # fonts know no lone surrogates, which JSON can smuggle in
    return "\n".join(textwrap.wrap(drawable, max(20, int(width * 12)), max_lines=3, placeholder=" …"))


def hexadecimal(colours: Colormap, steps: int) -> list[str]:
    """``steps`` colours of a map, first to last, as pages write them."""
    return [to_hex(colours(step / (steps - 1) if steps > 1 else 0.0)) for step in range(steps)]


def ink_on(position: float) -> str:
    """Black or white, whichever has the higher contrast (WCAG 2) on the sequential map at ``position`` in [0, 1]."""
    red, green, blue = ((part + 0.055) ** 2.4 / 1.055**2.4 for part in SEQUENTIAL(float(position))[:3])
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


def sparse_ticks(count: int, most: int) -> Sequence[int]:
    """At most ``most`` evenly spaced indices out of ``count``, at steps that are easy to count by."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 128, count) if -(-count // step) <= most)
    return range(0, count, step)
