import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report.page import write_report
from moe_coverage_plugin.report.view import channel_groups

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&"


class Page(HTMLParser):
    """Elements of a page with their attributes, and the text inside each kind of element."""

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


def test_page_and_pictures_are_complete(make_view, tmp_path: Path) -> None:
    view = make_view()
    write_report(view, tmp_path / "new" / "report")
    names = sorted(path.name for path in (tmp_path / "new" / "report").iterdir())
    assert names == ["experts.png", "index.html", "layers.png", "widths.png"]
    for name in names:
        if name.endswith(".png"):
            with Image.open(tmp_path / "new" / "report" / name) as picture:
                assert min(picture.size) > 300
                assert len(picture.convert("RGB").getcolors(maxcolors=2**24) or []) > 20


def test_page_holds_the_plan(make_view, tmp_path: Path) -> None:
    view = make_view()
    write_report(view, tmp_path)
    page = Page(tmp_path / "index.html")
    plan = page.plan
    assert plan["channels"] == view.intermediate_size
    assert plan["widths"] == view.widths_LE.tolist()
    assert plan["tokens"] == view.tokens_LE.tolist()
    np.testing.assert_allclose(plan["coverage"], view.coverage_LE, atol=6e-5)
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
    assert {"model", "none", "recipe", "by hand"} <= {*page.inside("th"), *page.inside("td")}


def test_page_leaves_out_what_was_not_measured(make_view, tmp_path: Path) -> None:
    absent = ["channels_LEI", "expert_prior_LE", "layer_loss_L", "layer_prior_L", "tokens_LE"]
    write_report(make_view(**dict.fromkeys(absent), facts={}, title=""), tmp_path)
    page = Page(tmp_path / "index.html")
    assert {key for key, value in page.plan.items() if value is None} == {"shares", "coverage", "prior", "tokens"}
    assert page.inside("title") == page.inside("h1") == ["Pruning plan"]
    assert page.inside("button") == ["layer", "block", "live experts", "channels kept", "keep ratio, %"]
    assert "without calibration tokens" not in page.inside("option")
    assert "Facts" not in page.inside("h2")


def test_page_asks_nobody_for_anything(make_view, tmp_path: Path) -> None:
    write_report(make_view(), tmp_path)
    page = Page(tmp_path / "index.html")
    addresses = [
        value for _, attributes in page.elements for key in ("src", "href", "srcset") if (value := attributes.get(key))
    ]
    assert len(addresses) == 2
    assert all(address.startswith("data:") for address in addresses)
    (policy,) = (meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert all(image["alt"] for image in page.all("img"))
    text = (tmp_path / "index.html").read_text()
    assert "@import" not in text
    assert "url(http" not in text


def test_names_and_facts_are_text(make_view, tmp_path: Path) -> None:
    view = make_view(names=[HOSTILE] * 3, title=HOSTILE, facts={HOSTILE: HOSTILE, "odd": "\ud800"})
    write_report(view, tmp_path)
    page = Page(tmp_path / "index.html")
    assert len(page.all("script")) == 2
    assert len(page.all("img")) == 1
    assert page.inside("h1") == page.inside("title") == [HOSTILE]
    assert HOSTILE in page.inside("th")
    assert HOSTILE in page.inside("td")


def test_page_of_a_large_model_stays_small(make_view, tmp_path: Path) -> None:
    write_report(make_view(layers=48, experts=128), tmp_path)
    assert (tmp_path / "index.html").stat().st_size < 3_000_000


def test_a_place_that_cannot_be_written_is_refused(make_view, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CoverageError, match="cannot be written"):
        write_report(make_view(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
