import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report.page import write_report
from moe_coverage_plugin.report.stored_weights import StoredWeights
from moe_coverage_plugin.report.summary import Summary
from moe_coverage_plugin.report.verdict import verdict
from moe_coverage_plugin.report.view import channel_groups

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&"


class Page(HTMLParser):
    """Elements of a page with their attributes, and texts with the tags of their elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and data.strip():
            self.texts.append((self.elements[-1][0], data.strip()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    @property
    def plan(self) -> dict:
        return json.loads(next(text for text in self.inside("script") if text.startswith("{")))


def test_page_and_picture_are_written(make_view, tmp_path: Path) -> None:
    write_report(make_view(), tmp_path / "new" / "report")
    assert sorted(path.name for path in (tmp_path / "new" / "report").iterdir()) == ["index.html", "widths.png"]
    with Image.open(tmp_path / "new" / "report" / "widths.png") as picture:
        assert min(picture.size) > 300


def test_page_has_the_plan(make_view, tmp_path: Path) -> None:
    view = make_view()
    write_report(view, tmp_path)
    page = Page(tmp_path / "index.html")
    plan = page.plan
    assert plan["channels"] == view.intermediate_size
    assert plan["widths"] == view.widths_LE.tolist()
    assert plan["tokens"] == view.tokens_LE.tolist()
    np.testing.assert_allclose(plan["coverage"], view.coverage_LE, atol=6e-5)
    np.testing.assert_allclose(plan["layerCoverage"], view.coverage_L, atol=6e-5)
    np.testing.assert_allclose(plan["layerLoss"], view.layer_loss_L, rtol=6e-4)
    np.testing.assert_allclose(plan["prior"], view.expert_prior_LE, rtol=6e-4)
    shares_LEG = view.score_shares(channel_groups(view.intermediate_size))
    np.testing.assert_allclose(plan["shares"], shares_LEG, atol=6e-5)
    assert len(plan["groupColours"]) == shares_LEG.shape[-1]
    assert page.inside("option")[: view.layers] == [f"{layer}: {name}" for layer, name in enumerate(view.names)]
    chosen = [attributes["value"] for attributes in page.all("option") if "selected" in attributes]
    assert chosen == [str(view.most_unequal_layer)]
    values = [attributes.get("data-value") for tag, attributes in page.elements if tag in ("td", "th")]
    for values_L in (view.keep_ratio_L, view.coverage_L, view.layer_loss_L, view.layer_prior_L):
        assert {str(value) for value in values_L.tolist()} <= {*values}
    assert {"channel scores", "fisher", "seed", "17"} <= {*page.inside("th"), *page.inside("td")}


def test_page_begins_with_the_verdict_and_the_figures(make_view, tmp_path: Path) -> None:
    view = make_view()
    write_report(view, tmp_path)
    page = Page(tmp_path / "index.html")
    result = verdict(view)
    assert result.warnings
    assert page.inside("h1") == ["a random plan"]
    assert page.inside("p")[0] == result.summary
    assert page.inside("li") == result.warnings
    shown = [text.replace("\N{NO-BREAK SPACE}", " ") for text in page.inside("dd")]
    share = f"{100 * view.keep_ratio:.1f} %"
    assert shown[:6] == [
        "3.0 MiB",
        "25.0 % of 12.0 MiB before",
        "4 bits",
        "int",
        share,
        f"{view.widths_LE.sum()} of 1,536",
    ]
    assert {"1 of 24", "3 layers of 8 experts", "8 batches", "4,096 tokens", "mini-moe", "by_hand"} <= {*shown}
    bars = [attributes["style"] for attributes in page.all("span")]
    shares = [25, 100 * view.keep_ratio, 100 * view.coverage]
    assert bars == [f"width: {share:.2f}%" for share in shares]


def test_page_leaves_out_values_that_were_not_measured(bare_view, tmp_path: Path) -> None:
    write_report(bare_view, tmp_path)
    page = Page(tmp_path / "index.html")
    absent = {"shares", "coverage", "layerCoverage", "layerLoss", "prior", "tokens"}
    assert {key for key, value in page.plan.items() if value is None} == absent
    assert page.inside("title") == page.inside("h1") == ["Pruning plan"]
    assert page.inside("dt") == ["Channels kept", "Experts removed", "channel"]
    assert page.inside("button") == ["layer", "experts kept", "channels kept"]
    assert "fewer than 32 calibration tokens" not in page.inside("option")
    assert "Details" not in page.inside("h2")


def test_priors_that_are_equal_for_all_are_left_out(make_view, tmp_path: Path) -> None:
    write_report(make_view(expert_prior_LE=torch.ones(3, 8), layer_prior_L=torch.ones(3)), tmp_path)
    page = Page(tmp_path / "index.html")
    assert page.plan["prior"] is None
    assert "prior" not in page.inside("button")


def test_shares_above_100_percent_are_shown(make_view, tmp_path: Path) -> None:
    """A padded checkpoint can be larger than the original one; the bar is then limited to 100 %."""
    write_report(make_view(summary=Summary(weights=StoredWeights(3 * 2**20, 2 * 2**20))), tmp_path)
    page = Page(tmp_path / "index.html")
    assert page.inside("dd")[1].replace("\N{NO-BREAK SPACE}", " ") == "150.0 % of 2.0 MiB before"
    assert page.all("span")[0]["style"] == "width: 100.00%"


def test_page_loads_no_other_files(make_view, tmp_path: Path) -> None:
    write_report(make_view(), tmp_path)
    page = Page(tmp_path / "index.html")
    addresses = [
        value for _, attributes in page.elements for key in ("src", "href", "srcset") if (value := attributes.get(key))
    ]
    assert addresses == ["data:,"]
    (policy,) = (meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    text = (tmp_path / "index.html").read_text()
    assert "@import" not in text
    assert "url(http" not in text


def test_names_and_facts_are_escaped(make_view, tmp_path: Path) -> None:
    summary = Summary(HOSTILE, HOSTILE, weights=StoredWeights(1, 1, HOSTILE, HOSTILE))
    facts = {HOSTILE: HOSTILE, "odd": "\ud800"}
    write_report(make_view(names=[HOSTILE] * 3, title=HOSTILE, summary=summary, facts=facts), tmp_path)
    page = Page(tmp_path / "index.html")
    assert len(page.all("script")) == 2
    assert not page.all("img")
    assert page.inside("h1") == page.inside("title") == [HOSTILE]
    assert HOSTILE in page.inside("th")
    assert HOSTILE in page.inside("td")
    assert page.inside("dd").count(HOSTILE) == 4


def test_page_of_a_large_model_stays_small(make_view, tmp_path: Path) -> None:
    write_report(make_view(layers=48, experts=128), tmp_path)
    assert (tmp_path / "index.html").stat().st_size < 1_000_000


def test_a_path_that_cannot_be_written_is_an_error(make_view, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CoverageError, match="cannot be written"):
        write_report(make_view(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
