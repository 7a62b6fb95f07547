"""Pictures of a plan: layers (paper, figure 4), the experts of a layer (figure 7), and the widths of all experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.view import PlanView, channel_groups

BAR_WIDTH = 0.88
CUT = {"edgecolor": "#777777", "hatch": "/////", "linewidth": 0}


class _Strip(NamedTuple):
    label: str
    values_L: np.ndarray
    number: str  # format of a value


def layer_figure(view: PlanView) -> Figure:
    """Raw loss, smoothed loss, coverage and keep ratio over the layers, as aligned strips of colour.

    Strips of what was not measured are left out.
    """
    strips = _strips(view)
    width = min(max(3.2 + 0.19 * view.layers, 6.5), 18)
    figure = style.new_figure(width, 0.85 + 0.65 * len(strips), _titled(view, "Layers"))
    all_axes = figure.subplots(len(strips), 1, sharex=True, squeeze=False)[:, 0]
    for axes, strip in zip(all_axes, strips, strict=True):
        _draw_strip(figure, axes, strip)
    last = all_axes[-1]
    last.set_xticks(style.sparse_ticks(view.layers, most=50))
    last.tick_params(bottom=True, labelbottom=True)
    last.set_xlabel("MoE layer", fontsize=style.LABEL, color=style.INK)
    return figure


def _strips(view: PlanView) -> list[_Strip]:
    measured = [
        ("Loss rise\n[nats per token]", view.layer_loss_L, 1, ".3g"),
        ("Loss rise,\nsmoothed", view.layer_prior_L, 1, ".3g"),
        ("Coverage\n[% of score]", view.coverage_L, 100, ".1f"),
        ("Keep ratio\n[% of channels]", view.keep_ratio_L, 100, ".1f"),
    ]
    return [
        _Strip(label, _numbers(values_L) * scale, number)
        for label, values_L, scale, number in measured
        if values_L is not None
    ]


def _draw_strip(figure: Figure, axes: Axes, strip: _Strip) -> None:
    values_L = strip.values_L
    low, high = _limits(values_L)
    image = axes.imshow(values_L[None], cmap=style.SEQUENTIAL, vmin=low, vmax=high, aspect="auto")
    style.separate_cells(axes, len(values_L), 1)
    for layer, value in enumerate(values_L):
        text = axes.text(layer, 0, format(value, strip.number), ha="center", va="center", fontsize=style.CELL)
        text.set(color=style.ink_on((value - low) / (high - low)), rotation=90 if len(values_L) > 12 else 0)
        text.set_in_layout(False)
    style.style_axes(axes)
    axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    axes.set_ylabel(strip.label, rotation=0, ha="right", va="center", fontsize=style.LABEL, color=style.INK)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.1, aspect=5, ticks=[low, high])
    bar.ax.set_yticklabels([format(value, strip.number) for value in (low, high)])
    style.style_axes(bar.ax)


def _limits(values: np.ndarray) -> tuple[float, float]:
    """The range of the values, but not so narrow that rounding would look like a difference."""
    low, high = float(values.min()), float(values.max())
    least = 0.01 * max(abs(low), abs(high)) or 1.0
    margin = max(0.0, (least - (high - low)) / 2)
    return low - margin, high + margin


def expert_figure(view: PlanView, layer: int) -> Figure:
    """What every expert of a layer keeps, and above it the attribution that its coverage follows.

    A bar is an expert's total score, cut into groups of its channels from best (bottom) to worst; its height up to the
    black line, the coverage, is kept, what is hatched above is removed. Without channel scores a bar is the expert's
    channels, and the line its keep ratio.
    """
    width = min(max(3.0 + 0.075 * view.experts, 6.5), 13)
    figure = style.new_figure(width, 4.3, _titled(view, f"Experts of layer {layer}, {view.names[layer]}"))
    rows = ["br"] if view.expert_prior_LE is None else ["p.", "br"]
    ratios = [1, 2.6][-len(rows) :]
    panels = figure.subplot_mosaic("\n".join(rows), height_ratios=ratios, width_ratios=[width, 0.15])
    bars = panels["b"]
    if view.expert_prior_LE is not None:
        _draw_prior(panels["p"], _numbers(view.expert_prior_LE[layer]))
    if view.channels_LEI is None:
        panels["r"].remove()
    ends_E, tops_E = _draw_bars(bars, view, layer)
    handles = _mark_kept(bars, view, layer, ends_E, tops_E)
    if view.channels_LEI is not None:
        _draw_ranks(figure, panels["r"], view.intermediate_size)
    bars.set(ylim=(0, 1), xlim=(-0.7, view.experts - 0.3))
    bars.set_xticks(style.sparse_ticks(view.experts, most=33))
    bars.set_yticks(np.linspace(0, 1, 6), [str(tick) for tick in range(0, 101, 20)])
    share = "channels" if view.channels_LEI is None else "score"
    style.style_axes(bars, "expert", f"share of its {share} [%]")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=style.TICK, frameon=False)
    return figure


def _draw_prior(axes: Axes, prior_E: np.ndarray) -> None:
    experts_E = np.arange(len(prior_E))
    axes.vlines(experts_E, 0, prior_E, color=style.FAINT, linewidth=0.8)
    axes.plot(experts_E, prior_E, "o", color=style.METHODS[0], markersize=3.5, markeredgewidth=0, clip_on=False)
    axes.set_ylim(min(0.0, float(prior_E.min()) * 1.1), max(0.0, float(prior_E.max())) * 1.1 or 1.0)
    axes.set_xlim(-0.7, len(prior_E) - 0.3)
    axes.set_xticks(style.sparse_ticks(len(prior_E), most=33))
    style.value_grid(axes)
    axes.grid(visible=False, axis="x")
    style.style_axes(axes, y="attribution,\nsmoothed")
    axes.tick_params(labelbottom=False)


def rank_colours(groups: int) -> ListedColormap:
    """A colour for each group of channels, best first; none so dark that its end would not show on it."""
    return ListedColormap(style.SEQUENTIAL(np.linspace(0.05, 1, groups)))


def _draw_bars(axes: Axes, view: PlanView, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the kept part of every bar ends, and where the bar does."""
    experts_E = np.arange(view.experts)
    ends = channel_groups(view.intermediate_size)
    shares_LEG, coverage_LE = view.score_shares(ends), view.coverage_LE
    if shares_LEG is None or coverage_LE is None:
        axes.bar(experts_E, 1.0, BAR_WIDTH, color=style.SEQUENTIAL(0.35), linewidth=0)
        return _numbers(view.keep_ratio_LE[layer]), np.ones(view.experts)
    tops_EG = _numbers(shares_LEG[layer].cumsum(-1))
    colours = rank_colours(len(ends))
    for group, height_E in enumerate(_numbers(shares_LEG[layer]).T):
        axes.bar(experts_E, height_E, BAR_WIDTH, tops_EG[:, group] - height_E, color=colours(group), linewidth=0)
    return np.minimum(_numbers(coverage_LE[layer]), tops_EG[:, -1]), tops_EG[:, -1]


def _draw_ranks(figure: Figure, axes: Axes, channels: int) -> None:
    ranks = [0, *channel_groups(channels)]
    mapping = ScalarMappable(BoundaryNorm(ranks, len(ranks) - 1), rank_colours(len(ranks) - 1))
    bar = figure.colorbar(mapping, cax=axes, ticks=ranks)
    style.style_axes(bar.ax, y="channels by rank, best first")


def _mark_kept(axes: Axes, view: PlanView, layer: int, ends_E: np.ndarray, tops_E: np.ndarray) -> list[Artist]:
    """Line and hatching on every bar, marks of what has none, and the legend's handles for all of them."""
    experts_E = np.arange(view.experts)
    cut = axes.bar(experts_E, tops_E - ends_E, BAR_WIDTH, ends_E, color=(1, 1, 1, 0.62), **CUT)
    for patch in cut:
        patch.set(edgecolor=CUT["edgecolor"], hatch_linewidth=0.5)
    for colour, linewidth in (("white", 2.6), ("black", 1.3)):
        axes.hlines(ends_E, experts_E - BAR_WIDTH / 2, experts_E + BAR_WIDTH / 2, color=colour, linewidth=linewidth)
    handles: list[Artist] = [
        Line2D([], [], color="black", linewidth=1.3, label="kept up to here"),
        Patch(facecolor="white", label="removed channels", **CUT),
    ]
    dead_E = view.dead_LE[layer].numpy()
    if dead_E.any():
        for patch in np.array(cut.patches)[dead_E]:
            patch.set(facecolor="white", edgecolor=style.REMOVED)
        look = {"color": style.REMOVED, "marker": "X", "markersize": 5, "markeredgewidth": 0, "linestyle": "none"}
        axes.plot(experts_E[dead_E], np.full(dead_E.sum(), 0.035), label=f"removed experts ({dead_E.sum()})", **look)
        handles.append(axes.lines[-1])
    unscored_E = tops_E == 0
    if unscored_E.any():
        look = {"facecolor": "none", "edgecolor": style.FAINT, "linestyle": ":", "linewidth": 0.7}
        axes.bar(experts_E[unscored_E], 1.0, BAR_WIDTH, **look)
        handles.append(Patch(label=f"no score ({unscored_E.sum()})", **look))
    return handles


def width_figure(view: PlanView) -> Figure:
    """Kept channels of every expert as a map of layers by experts; removed experts stand out."""
    numbered = view.experts <= 32 and view.layers <= 32
    cell_width, cell_height = (0.4, 0.3) if numbered else (0.085, 0.085)
    width = min(max(1.9 + cell_width * view.experts, 6.5), 14)
    height = min(max(1.1 + cell_height * view.layers, 2.2), 14)
    figure = style.new_figure(width, height, _titled(view, "Channels kept in every expert"))
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
    axes.set_yticks(style.sparse_ticks(view.layers, most=25))
    style.style_axes(axes, "expert", "MoE layer")
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[0, *channel_groups(view.intermediate_size, most=4)])
    style.style_axes(bar.ax, y=f"channels kept of {view.intermediate_size}")
    if removed := int(view.dead_LE.sum()):
        handle = Patch(facecolor=style.REMOVED, label=f"removed experts ({removed})")
        # beside the label of the axis, in a band that is there anyway
        figure.legend(handles=[handle], loc="lower right", fontsize=style.TICK, frameon=False, borderaxespad=0.2)
    return figure


def _numbers(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()


def _titled(view: PlanView, what: str) -> str:
    return f"{what}: {view.title}" if view.title else what
