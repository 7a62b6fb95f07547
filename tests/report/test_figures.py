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
from moe_coverage_plugin.report.figures import width_figure


def check_picture(figure: Figure) -> None:
    """Check that the figure is drawn, that all texts are inside it, and that tick labels do not overlap."""
    with Image.open(io.BytesIO(style.png(figure))) as picture:
        assert picture.format == "PNG"
        assert 300 <= min(picture.size) <= max(picture.size) <= 3000
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
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


def shows(text: Text) -> bool:
    return text.get_visible() and bool(text.get_text())


def drawn_ticks(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    inside = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for tick in inside for label in (tick.label1, tick.label2) if shows(label)]


def map_of(figure: Figure) -> Axes:
    (axes,) = (axes for axes in figure.axes if axes.images)
    return axes


@pytest.mark.parametrize(("layers", "experts"), [(4, 16), (48, 128), (1, 2)])
def test_map_shows_every_width(make_view, layers: int, experts: int) -> None:
    view = make_view(layers=layers, experts=experts)
    figure = width_figure(view)
    axes = map_of(figure)
    shown = axes.images[0].get_array()
    assert np.array_equal(shown.filled(0), view.widths_LE)
    assert np.array_equal(np.ma.getmaskarray(shown), view.removed_LE)
    assert axes.images[0].cmap.get_bad().tolist() == list(to_rgba(style.REMOVED))
    assert axes.images[0].get_clim() == (0, view.intermediate_size)
    written = [int(text.get_text()) for text in axes.texts]
    assert written == (view.widths_LE.flatten().tolist() if max(layers, experts) <= 32 else [])
    assert figure.legends[0].get_texts()[0].get_text() == "removed experts (1)"
    check_picture(figure)


def test_rows_have_the_numbers_of_their_layers(make_view) -> None:
    names = [f"model.layers.{layer}.mlp.experts" for layer in (1, 2, 4)]
    assert [label.get_text() for label in map_of(width_figure(make_view(names=names))).get_yticklabels()] == [
        *("1", "2", "4")
    ]


def test_map_without_removed_experts_has_no_legend_for_them(make_view) -> None:
    assert not width_figure(make_view(widths_LE=torch.full((3, 8), 64))).legends


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("title", [r"$\frac$ <b> & _x", "a " * 300, "x" * 500, "模型", "\ud800\x00"])
def test_any_title_can_be_drawn(make_view, title: str) -> None:
    check_picture(width_figure(make_view(layers=1, experts=2, title=title, names=[title])))


@pytest.mark.parametrize("position", np.linspace(0, 1, 21))
def test_numbers_have_enough_contrast_to_their_cells(position: float) -> None:
    def luminance(colour) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgba(colour)[:3]]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    pair = sorted(luminance(colour) for colour in (style.SEQUENTIAL(position), style.ink_on(position)))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
