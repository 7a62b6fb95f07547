import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from PIL import Image

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.pareto import pareto_figure, pareto_front, write_pareto
from moe_coverage_plugin.report.results import ResultRow

# few different values, so that equal ones are common
rows = st.builds(ResultRow, st.sampled_from("abc"), st.just("m"), st.integers(1, 6), st.integers(0, 5).map(float))


def beats(one: ResultRow, other: ResultRow) -> bool:
    at_most = one.bytes <= other.bytes and one.loss <= other.loss
    return at_most and (one.bytes < other.bytes or one.loss < other.loss)


@given(st.lists(rows, max_size=15))
def test_front_has_exactly_the_rows_that_no_other_beats(several: list[ResultRow]) -> None:
    front = pareto_front(several)
    expected = [row for row in several if not any(beats(other, row) for other in several)]
    assert sorted(map(repr, front)) == sorted(map(repr, expected))
    assert front == sorted(expected, key=lambda row: row.bytes)
    assert [row.loss for row in front] == sorted((row.loss for row in front), reverse=True)


@given(st.lists(rows, max_size=15), st.randoms(use_true_random=False))
def test_front_does_not_depend_on_the_order(several: list[ResultRow], random) -> None:
    shuffled = random.sample(several, len(several))
    assert {*pareto_front(shuffled)} == {*pareto_front(several)}
    assert pareto_front(pareto_front(several)) == pareto_front(several)


RESULTS = [
    ResultRow("original", "none", 20_000_000, 1.95),
    ResultRow("half", "paper", 12_000_000, 2.8),
    ResultRow("quarter", "paper", 17_000_000, 2.2, sparsity=0.25, seed=0),
    ResultRow("quarter", "paper", 17_000_000, 2.4, sparsity=0.25, seed=1),
    ResultRow("quarter", "_ours", 17_000_000, 2.0, sparsity=0.25),
    ResultRow("quarter, 4 bits", "_ours", 4_000_000, 2.1, sparsity=0.25, bits=4),
]


def points_of(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Drawn points by the name of their method in the legend."""
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()][:-1]
    axes = figure.axes[0]
    looks = {(line.get_color(), line.get_marker()): line for line in axes.lines if line.get_marker() in style.MARKERS}
    drawn = {}
    for name, handle in zip(names, legend.legend_handles, strict=False):
        line = looks[handle.get_color(), handle.get_marker()]
        drawn[name] = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return drawn


def test_picture_shows_means_deviations_and_front() -> None:
    figure = pareto_figure(RESULTS)
    expected = {"none": [(20, 1.95)], "paper": [(12, 2.8), (17, 2.3)], "_ours": [(17, 2.0), (4, 2.1)]}
    drawn = points_of(figure)
    assert drawn.keys() == expected.keys()
    for method, points in expected.items():
        assert drawn[method] == [pytest.approx(point) for point in points]
    axes = figure.axes[0]
    (front,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert front.get_xydata().tolist() == [[4, 2.1], [17, 2.0], [20, 1.95]]
    (bar,) = axes.containers
    segment = bar[2][0].get_segments()[0]
    assert segment[:, 1] == pytest.approx([2.3 - 0.02**0.5, 2.3 + 0.02**0.5])
    assert axes.get_xscale() == "log"
    assert "MB" in axes.get_xlabel()


def test_similar_sizes_have_a_linear_scale_and_large_ones_are_in_gigabytes() -> None:
    axes = pareto_figure([ResultRow("a", "m", 10**10, 1.0), ResultRow("b", "m", 2 * 10**10, 0.5)]).axes[0]
    assert axes.get_xscale() == "linear"
    assert "GB" in axes.get_xlabel()
    assert axes.lines[0].get_xdata().tolist() == [10, 20]


def test_names_of_the_front_are_inside_and_do_not_overlap() -> None:
    crowd = [
        ResultRow(f"a long name of result {index}" * 2, "m", 1000 + index, 2 - index / 1e4) for index in range(40)
    ]
    figure = pareto_figure(crowd)
    style.png(figure)
    axes = figure.axes[0]
    names = [child for child in axes.get_children() if isinstance(child, Annotation)]
    boxes = [name.get_window_extent() for name in names if name.get_visible()]
    assert len(names) == 40
    assert len(boxes) > 1
    for index, box in enumerate(boxes):
        assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_legend_is_inside_the_figure_with_long_names() -> None:
    methods = [f"method {index} with a long name" * (1 + index % 2) for index in range(12)]
    figure = pareto_figure([ResultRow("a", method, 10 + index, 1.0) for index, method in enumerate(methods)])
    style.png(figure)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1


class Cells(HTMLParser):
    """Texts of table cells by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_png_and_page_are_complete(tmp_path: Path) -> None:
    write_pareto(RESULTS, tmp_path / "deep" / "pareto.png")
    with Image.open(tmp_path / "deep" / "pareto.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
    write_pareto(RESULTS, tmp_path / "deep" / "pareto.html")
    rows = Cells((tmp_path / "deep" / "pareto.html").read_text()).rows
    assert rows[0] == ["name", "size, MB", "loss", "std. deviation", "runs", "method", "sparsity", "bits"]
    assert rows[1] == ["quarter, 4 bits(on the front)", "4.00", "2.1000", "", "1", "_ours", "0.25", "4"]
    assert rows[-2] == ["quarter(on the front)", "17.00", "2.0000", "", "1", "_ours", "0.25", ""]
    assert rows[-3] == ["quarter", "17.00", "2.3000", "0.1414", "2", "paper", "0.25", ""]
    assert len(rows) == 6
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["pareto.html", "pareto.png"]


@pytest.mark.parametrize("name", ["pareto.pdf", "pareto", "pareto.HTML5"])
def test_other_suffixes_are_errors(tmp_path: Path, name: str) -> None:
    with pytest.raises(CoverageError, match=r"writes \.png or \.html"):
        write_pareto(RESULTS, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_no_results_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="0 results"):
        write_pareto([], tmp_path / "pareto.png")


@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    hostile = ["$\\frac$", "_", "", "<script>alert(1)</script>", "\ud800\x00", "\n\n", "x" * 999]
    odd = [ResultRow(name, name, 10 + index, 9.0 - index) for index, name in enumerate(hostile)]
    with Image.open(io.BytesIO(style.png(pareto_figure(odd)))) as picture:
        picture.load()
    write_pareto(odd, tmp_path / "pareto.html")
    assert "<script>alert" not in (tmp_path / "pareto.html").read_text()
