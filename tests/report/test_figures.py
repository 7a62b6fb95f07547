import io
import itertools

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.figures import expert_figure, layer_figure, width_figure
from moe_coverage_plugin.report.view import PlanView, channel_groups

STRIPS = {"layer_loss_L": 1, "layer_prior_L": 1, "coverage_L": 100, "keep_ratio_L": 100}


def images(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def check_picture(figure: Figure) -> None:
    """It opens, shows something, and every text is inside it."""
    with Image.open(io.BytesIO(style.png(figure))) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) >= 300
        assert max(picture.size) <= 3000
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
        assert colours is not None
        assert len(colours) > 20
    room = figure.bbox
    axes_lines = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    of_ticks = {
        label for axis in axes_lines for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)
    }
    others = [text for text in figure.findobj(Text) if text not in of_ticks and shows(text)]
    ticks = [drawn_ticks(axis) for axis in axes_lines]
    for text in itertools.chain(others, *ticks):
        box = text.get_window_extent()
        assert room.x0 <= box.x0 <= box.x1 <= room.x1, text
        assert room.y0 <= box.y0 <= box.y1 <= room.y1, text
    for labels in ticks:
        assert not any(overlap(*pair) for pair in itertools.pairwise(labels))


def shows(text: Text) -> bool:
    return text.get_visible() and bool(text.get_text())


def drawn_ticks(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    inside = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for tick in inside for label in (tick.label1, tick.label2) if shows(label)]


def overlap(one: Text, other: Text) -> bool:
    return one.get_window_extent().overlaps(other.get_window_extent())


def expected_strips(view: PlanView) -> list[np.ndarray]:
    values = {name: getattr(view, name) for name in STRIPS}
    return [scale * values[name].numpy() for name, scale in STRIPS.items() if values[name] is not None]


@pytest.mark.parametrize(
    "absent",
    [[], ["layer_loss_L"], ["layer_loss_L", "layer_prior_L"], ["channels_LEI"], ["layer_loss_L", "channels_LEI"]],
)
def test_strips_show_what_was_measured(make_view, absent: list[str]) -> None:
    view = make_view(**dict.fromkeys(absent))
    shown = images(layer_figure(view))
    for axes, expected in zip(shown, expected_strips(view), strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), expected[None])
        written = [float(text.get_text()) for text in axes.texts]
        np.testing.assert_allclose(written, expected, rtol=5e-3, atol=0.051)
    assert [axes.get_ylabel().split("\n")[0] for axes in shown][-1] == "Keep ratio"


def test_layers_that_differ_by_rounding_look_alike(make_view) -> None:
    loss_L = torch.tensor([0.5, 0.5 + 1e-12, 0.5])
    image = images(layer_figure(make_view(layer_loss_L=loss_L)))[0].images[0]
    spread = np.ptp(image.norm(loss_L.numpy()))
    assert spread < 1e-6


@pytest.mark.parametrize("layers", [1, 27, 94])
def test_strips_are_readable(make_view, layers: int) -> None:
    figure = layer_figure(make_view(layers=layers, experts=4))
    check_picture(figure)
    for axes in images(figure):
        for text in axes.texts:
            box = text.get_window_extent()
            assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1, text
        assert not any(overlap(*pair) for pair in itertools.pairwise(axes.texts))


def panels(figure: Figure) -> tuple[Axes, Axes | None]:
    bars = next(axes for axes in figure.axes if axes.get_xlabel() == "expert")
    prior = next((axes for axes in figure.axes if axes.get_ylabel().startswith("attribution")), None)
    return bars, prior


@pytest.mark.parametrize("layer", [0, 2])
def test_bars_show_scores_and_what_is_kept_of_them(make_view, layer: int) -> None:
    view = make_view()
    assert view.dead_LE[0, 1]
    bars, prior = panels(expert_figure(view, layer))
    shares_LEG = view.score_shares(channel_groups(view.intermediate_size))
    for group, container in enumerate(bars.containers[: shares_LEG.shape[-1]]):
        heights = [patch.get_height() for patch in container.patches]
        np.testing.assert_allclose(heights, shares_LEG[layer, :, group])
        bottoms = [patch.get_y() for patch in container.patches]
        np.testing.assert_allclose(bottoms, shares_LEG[layer, :, :group].sum(-1), atol=1e-12)
    assert prior is not None
    assert prior.lines[0].get_xdata().tolist() == list(range(view.experts))
    assert prior.lines[0].get_ydata().tolist() == view.expert_prior_LE[layer].tolist()

    scored_E = view.channels_LEI[layer].sum(-1) > 0
    cut = bars.containers[shares_LEG.shape[-1]].patches
    for expert in scored_E.nonzero().flatten().tolist():
        coverage = float(view.coverage_LE[layer, expert])
        assert cut[expert].get_y() == pytest.approx(coverage)
        assert cut[expert].get_y() + cut[expert].get_height() == pytest.approx(1)
        assert cut[expert].get_hatch()
        assert (cut[expert].get_edgecolor() == to_rgba(style.REMOVED)) == bool(view.dead_LE[layer, expert])
    ends = [path.vertices[0, 1] for path in bars.collections[-1].get_paths()]
    np.testing.assert_allclose(np.array(ends)[scored_E], view.coverage_LE[layer][scored_E])


def test_removed_and_unscored_experts_are_marked_and_explained(make_view) -> None:
    widths_LE = make_view().widths_LE.clone()
    widths_LE[0, :4] = torch.tensor([0, 0, 64, 0])
    figure = expert_figure(make_view(widths_LE=widths_LE), 0)
    crosses = panels(figure)[0].lines[0]
    assert crosses.get_xdata().tolist() == (widths_LE[0] == 0).nonzero().flatten().tolist()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "kept up to here",
        "removed channels",
        f"removed experts ({(widths_LE[0] == 0).sum()})",
        "no score (1)",
    ]


def test_without_scores_bars_are_channels(make_view) -> None:
    view = make_view(channels_LEI=None, expert_prior_LE=None)
    figure = expert_figure(view, 1)
    bars, prior = panels(figure)
    assert prior is None
    assert "channels" in bars.get_ylabel()
    ends = [path.vertices[0, 1] for path in bars.collections[-1].get_paths()]
    np.testing.assert_allclose(ends, view.keep_ratio_LE[1])
    check_picture(figure)


@pytest.mark.parametrize("experts", [2, 8, 64, 128])
def test_bars_are_readable(make_view, experts: int) -> None:
    check_picture(expert_figure(make_view(layers=1, experts=experts), 0))


def test_extreme_values_are_drawn(make_view) -> None:
    zeros = torch.zeros_like(make_view().channels_LEI)
    nothing = make_view(channels_LEI=zeros, expert_prior_LE=zeros[..., 0], layer_loss_L=zeros[:, 0, 0])
    negative = make_view(expert_prior_LE=zeros[..., 0] - 1, layer_loss_L=zeros[:, 0, 0] - 1e-9)
    huge = make_view(channels_LEI=zeros + 1e300, expert_prior_LE=zeros[..., 0] + 1e30)
    for view in (nothing, negative, huge):
        check_picture(layer_figure(view))
        check_picture(expert_figure(view, 0))


@pytest.mark.parametrize(("layers", "experts"), [(4, 16), (48, 128), (1, 2), (94, 8)])
def test_map_shows_every_width(make_view, layers: int, experts: int) -> None:
    view = make_view(layers=layers, experts=experts)
    figure = width_figure(view)
    (axes,) = images(figure)
    shown = axes.images[0].get_array()
    assert np.array_equal(shown.filled(0), view.widths_LE)
    assert np.array_equal(np.ma.getmaskarray(shown), view.dead_LE)
    assert axes.images[0].cmap.get_bad().tolist() == list(to_rgba(style.REMOVED))
    written = [int(text.get_text()) for text in axes.texts]
    assert written == (view.widths_LE.flatten().tolist() if max(layers, experts) <= 32 else [])
    assert figure.legends[0].get_texts()[0].get_text() == f"removed experts ({int(view.dead_LE.sum())})"
    check_picture(figure)


def test_map_without_removed_experts_has_no_legend_for_them(make_view) -> None:
    assert not width_figure(make_view(widths_LE=torch.full((3, 8), 64))).legends


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("title", [r"$\frac$ <b> & _x", "a " * 300, "x" * 500, "模型", "\ud800\x00"])
def test_any_title_can_be_drawn(make_view, title: str) -> None:
    view = make_view(layers=1, experts=2, title=title, names=[title])
    for figure in (layer_figure(view), expert_figure(view, 0), width_figure(view)):
        check_picture(figure)


@pytest.mark.parametrize("position", np.linspace(0, 1, 21))
def test_numbers_stand_out_from_their_cells(position: float) -> None:
    def luminance(colour) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgba(colour)[:3]]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    pair = sorted(luminance(colour) for colour in (style.SEQUENTIAL(position), style.ink_on(position)))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
