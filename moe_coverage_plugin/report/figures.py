"""The picture of a plan: the widths of all experts, for model cards."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.view import PlanView, channel_groups


def width_figure(view: PlanView) -> Figure:
    """Draw the kept channels of every expert as a map of layers by experts; removed experts stand out."""
    numbered = view.experts <= 32 and view.layers <= 32
    cell_width, cell_height = (0.4, 0.3) if numbered else (0.085, 0.085)
    width = min(max(1.9 + cell_width * view.experts, 6.5), 14)
    height = min(max(1.1 + cell_height * view.layers, 2.2), 14)
    what = "Channels kept in every expert"
    figure = style.new_figure(width, height, f"{what}: {view.title}" if view.title else what)
    axes = figure.subplots()
    widths_LE = view.widths_LE.detach().cpu().numpy()
    colours = style.SEQUENTIAL.with_extremes(bad=style.REMOVED)
    shown_LE = np.ma.masked_equal(widths_LE, 0)
    image = axes.imshow(shown_LE, vmin=0, vmax=view.intermediate_size, cmap=colours, aspect="auto")
    style.separate_cells(axes, view.experts, view.layers)
    if numbered:
        for (layer, expert), kept in np.ndenumerate(widths_LE):
            text = axes.text(expert, layer, str(kept), ha="center", va="center", fontsize=style.CELL)
            text.set_color(style.ink_on(kept / view.intermediate_size))
            text.set_in_layout(False)
    axes.set_xticks(style.sparse_ticks(view.experts, most=33))
    layers = style.sparse_ticks(view.layers, most=25)
    axes.set_yticks(layers, [view.layer_labels[layer] for layer in layers])
    style.style_axes(axes, "expert", "layer")
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[0, *channel_groups(view.intermediate_size, most=4)])
    style.style_axes(bar.ax, y=f"channels kept of {view.intermediate_size}")
    if removed := int(view.removed_LE.sum()):
        handle = Patch(facecolor=style.REMOVED, label=f"removed experts ({removed})")
        # the layout leaves a free band beside the label of the axis
        figure.legend(handles=[handle], loc="lower right", fontsize=style.TICK, frameon=False, borderaxespad=0.2)
    return figure
