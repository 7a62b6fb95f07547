"""The pages in a headless Chromium, opened from disk."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from moe_coverage_plugin.core.scores import TOKEN_FLOOR
from moe_coverage_plugin.report.page import write_report
from moe_coverage_plugin.report.pareto import write_pareto
from moe_coverage_plugin.report.results import ResultRow
from moe_coverage_plugin.report.verdict import verdict
from moe_coverage_plugin.report.view import PlanView

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
    ),
]
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&"
READABLE = """
const luminance = (colour) => {
  const linear = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const faults = [];
for (const element of document.querySelectorAll("main :not(svg *):not(script)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const pair = [luminance(style.color), luminance(ground(element))].sort((one, other) => other - one);
  const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (contrast < 4.5 || parseFloat(style.fontSize) < 13) faults.push([element.outerHTML, contrast, style.fontSize]);
}
return faults;
"""


# elements that extend beyond the right edge of the page or of their scrolling container
CLIPPED = """
const faults = [];
for (const element of document.querySelectorAll("main *")) {
  const box = element.getBoundingClientRect();
  const parent = element.closest(".scroll");
  const edge = parent && parent !== element ? parent.getBoundingClientRect().right : window.innerWidth;
  const shown = box.width && !element.matches(".hidden, .hidden *");
  if (shown && box.right > edge + 0.5) faults.push([element.outerHTML, box.right, edge]);
}
return faults;
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    assert BROWSER is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options, Service(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def plan(make_view: Callable[..., PlanView]) -> PlanView:
    return make_view(layers=4, experts=16)


@pytest.fixture(scope="module")
def plan_page(plan: PlanView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    write_report(plan, directory)
    return directory / "index.html"


@pytest.fixture(scope="module")
def pareto_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pareto") / "pareto.html"
    sizes = [(f"result {index}", f"method {index % 3}", 1000 * (index + 1), 3 - index % 5) for index in range(9)]
    write_pareto([ResultRow(*each) for each in sizes] + [ResultRow(HOSTILE, HOSTILE, 500, 9.0, model=HOSTILE)], path)
    return path


def opened(driver: Chrome, path: Path, width: int = 1200, scheme: str = "light") -> Chrome:
    """Open a page with a width in CSS pixels and a colour scheme, after clearing the logs."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    preference = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", preference)
    driver.get("about:blank")
    driver.get_log("performance")
    driver.get_log("browser")
    driver.get(path.as_uri())
    return driver


def requests(driver: Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [message["params"]["request"]["url"] for message in sent]


def column(table: WebElement, index: int) -> list[str]:
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[index].text for row in body_rows(table)]


def body_rows(table: WebElement) -> list[WebElement]:
    return table.find_elements(By.CSS_SELECTOR, "tbody tr")


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "").removesuffix(" %")) for text in texts]


@pytest.fixture(params=["plan_page", "pareto_page"])
def page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_pages_load_without_requests_and_errors(driver: Chrome, page: Path) -> None:
    opened(driver, page)
    assert driver.get_log("browser") == []
    urls = requests(driver)
    assert urls[0] == page.as_uri()
    assert all(url.startswith("data:") for url in urls[1:])
    widths = driver.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert all(width > 0 for width in widths)


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (420, "dark"), (800, "light"), (1200, "dark")])
def test_pages_are_readable(driver: Chrome, page: Path, width: int, scheme: str) -> None:
    opened(driver, page, width, scheme)
    assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert driver.execute_script("return window.innerWidth") == width
    assert driver.execute_script(READABLE) == []
    dark = driver.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_nothing_is_clipped_on_a_phone(driver: Chrome, make_view, tmp_path: Path) -> None:
    """All elements fit, including maps and charts of a large model; only wide tables of results scroll."""
    write_report(make_view(layers=48, experts=128, channels=16, block_size=4), tmp_path)
    opened(driver, tmp_path / "index.html", width=420)
    assert driver.get_log("browser") == []
    assert len(driver.find_elements(By.CSS_SELECTOR, "#width-map rect[data-expert]")) == 48 * 128
    assert driver.execute_script(CLIPPED) == []


def test_page_begins_with_the_verdict(driver: Chrome, plan: PlanView, plan_page: Path) -> None:
    opened(driver, plan_page, width=420)
    result = verdict(plan)
    # the driver returns no-break spaces as ordinary spaces
    assert driver.find_element(By.ID, "verdict").text == result.summary.replace("\N{NO-BREAK SPACE}", " ")
    warnings = driver.find_elements(By.CSS_SELECTOR, "#warnings li")
    assert [item.text for item in warnings] == [text.replace("\N{NO-BREAK SPACE}", " ") for text in result.warnings]
    assert warnings[-1].location["y"] + warnings[-1].size["height"] < 900


BARS = """
const bars = [...document.querySelectorAll("#layer-bars .bar")];
return bars.map((bar) => [bar.getAttribute("class"), bar.height.baseVal.value]);
"""


def test_bars_of_layers_have_absolute_scales(driver: Chrome, make_view, tmp_path: Path) -> None:
    """The scales of shares are 0 to 100 %, so that small differences look small; that of the loss rise begins at 0."""
    widths_LE = torch.full((3, 8), 56)
    widths_LE[1] = 16
    view = make_view(widths_LE=widths_LE)
    layers = view.layers
    write_report(view, tmp_path)
    opened(driver, tmp_path / "index.html")
    classes, heights = zip(*driver.execute_script(BARS), strict=True)
    full = driver.execute_script(
        "const rules = [...document.querySelectorAll('#layer-bars .rule')].map((rule) => rule.y1.baseVal.value);"
        "return rules[0] - rules[2]"
    )
    shown = [height / full for height in heights]
    assert shown[:layers] == pytest.approx(view.coverage_L.tolist(), abs=1e-3)
    assert shown[layers : 2 * layers] == pytest.approx(view.keep_ratio_L.tolist(), abs=1e-3)
    rise_L = view.layer_loss_L
    assert shown[2 * layers :] == pytest.approx((rise_L / rise_L.max()).tolist(), abs=1e-3)
    assert [index for index, name in enumerate(classes) if name == "bar low"] == [1]
    labels = [text.text for text in driver.find_elements(By.CSS_SELECTOR, "#layer-bars text")]
    assert labels[:3] == ["0", "50", "100"]


def test_selecting_a_layer_changes_bars_and_table(driver: Chrome, plan: PlanView, plan_page: Path) -> None:
    opened(driver, plan_page)
    choice = Select(driver.find_element(By.ID, "layer"))
    assert choice.first_selected_option.get_attribute("value") == str(plan.most_unequal_layer)
    assert plan.coverage_LE is not None
    pictures = set()
    for layer in range(plan.layers):
        choice.select_by_value(str(layer))
        table = driver.find_element(By.ID, "expert-table")
        assert numbers(column(table, 1)) == plan.widths_LE[layer].tolist()
        assert numbers(column(table, 2)) == pytest.approx((100 * plan.coverage_LE[layer]).tolist(), abs=0.06)
        pictures.add(driver.find_element(By.ID, "expert-bars").get_attribute("innerHTML"))
    assert len(pictures) == plan.layers


def test_end_marks_of_bars_show_the_coverage(driver: Chrome, plan: PlanView, plan_page: Path) -> None:
    opened(driver, plan_page)
    Select(driver.find_element(By.ID, "layer")).select_by_value("1")
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((mark) => Number(mark.getAttribute(arguments[1])))"
    )
    ends = driver.execute_script(script, "#expert-bars .end", "y1")
    rules = driver.execute_script(script, "#expert-bars .rule", "y1")[:6]
    assert plan.coverage_LE is not None
    shown = [(rules[0] - end) / (rules[0] - rules[5]) for end in ends]
    assert shown == pytest.approx(plan.coverage_LE[1].tolist(), abs=1e-3)


def test_map_shows_widths_and_selects_layers(driver: Chrome, plan: PlanView, plan_page: Path) -> None:
    opened(driver, plan_page)
    cells = driver.find_elements(By.CSS_SELECTOR, "#width-map rect[data-expert]")
    assert len(cells) == plan.layers * plan.experts
    removed = driver.find_elements(By.CSS_SELECTOR, "#width-map rect.removed")
    places = [(int(cell.get_attribute("data-layer")), int(cell.get_attribute("data-expert"))) for cell in removed]
    assert places == [tuple(place) for place in plan.removed_LE.nonzero().tolist()]
    cell = driver.find_element(By.CSS_SELECTOR, "#width-map rect[data-layer='2'][data-expert='5']")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(driver).move_to_element(cell).click().perform()
    tip = driver.find_element(By.ID, "tip")
    assert tip.is_displayed()
    assert tip.text.startswith("Layer 2, expert 5\n")
    assert f"{plan.widths_LE[2, 5]} of {plan.intermediate_size} channels" in tip.text
    assert Select(driver.find_element(By.ID, "layer")).first_selected_option.get_attribute("value") == "2"


VALUES = "return [...arguments[0].tBodies[0].rows].map((row) => row.cells[arguments[1]].dataset.value)"


def test_tables_are_sorted_by_any_column(driver: Chrome, page: Path) -> None:
    opened(driver, page)
    for table in driver.find_elements(By.CSS_SELECTOR, "table.sortable"):
        for index, button in enumerate(table.find_elements(By.CSS_SELECTOR, "thead button")):
            seen = []
            for _ in range(2):
                driver.execute_script("arguments[0].click()", button)
                header = button.find_element(By.XPATH, "..")
                values = driver.execute_script(VALUES, table, index)
                seen.append(header.get_attribute("aria-sort"))
                try:
                    ordered = sorted(map(float, values), reverse=seen[-1] == "descending")
                    assert list(map(float, values)) == ordered
                except ValueError:
                    names = [value for value in values if value and value.startswith(("model", "method", "result"))]
                    assert names == sorted(names, reverse=seen[-1] == "descending")
            assert sorted(seen) == ["ascending", "descending"]
            assert len(table.find_elements(By.CSS_SELECTOR, "[aria-sort]")) == 1


def test_filter_keeps_the_sorting_of_the_chosen_experts(driver: Chrome, plan: PlanView, plan_page: Path) -> None:
    opened(driver, plan_page)
    Select(driver.find_element(By.ID, "layer")).select_by_value("0")
    table = driver.find_element(By.ID, "expert-table")
    driver.execute_script("arguments[0].click()", table.find_elements(By.CSS_SELECTOR, "thead button")[1])
    tokens_LE = plan.tokens_LE
    assert tokens_LE is not None
    widths_E = plan.widths_LE[0]
    expected = {
        "all": widths_E >= 0,
        "unpruned": widths_E == plan.intermediate_size,
        "partly": (widths_E > 0) & (widths_E < plan.intermediate_size),
        "removed": widths_E == 0,
        "rare": tokens_LE[0] < TOKEN_FLOOR,
    }
    for name, chosen_E in expected.items():
        Select(driver.find_element(By.ID, "filter")).select_by_value(name)
        assert {int(text) for text in column(table, 0)} == {*chosen_E.nonzero().flatten().tolist()}
        widths = numbers(column(table, 1))
        assert widths == sorted(widths, reverse=True)
        assert driver.find_element(By.ID, "shown").text == f"{int(chosen_E.sum())} of {plan.experts} experts"


def test_hostile_names_are_not_executed(driver: Chrome, make_view, pareto_page: Path, tmp_path: Path) -> None:
    view = make_view(names=[HOSTILE, "2", "3"], title=HOSTILE, facts={HOSTILE: HOSTILE})
    write_report(view, tmp_path)
    for page in (tmp_path / "index.html", pareto_page):
        opened(driver, page)
        assert driver.execute_script("return window.hacked === undefined")
        assert driver.get_log("browser") == []
        assert HOSTILE in driver.find_element(By.TAG_NAME, "body").text
    opened(driver, tmp_path / "index.html")
    assert driver.title == driver.find_element(By.TAG_NAME, "h1").text == HOSTILE


def test_content_security_policy_blocks_injected_scripts(driver: Chrome, plan_page: Path) -> None:
    opened(driver, plan_page)
    driver.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.hacked = 1';"
        "document.body.append(script)"
    )
    assert driver.execute_script("return window.hacked === undefined")


def test_a_plan_without_measurements_is_shown(driver: Chrome, bare_view: PlanView, tmp_path: Path) -> None:
    write_report(bare_view, tmp_path)
    opened(driver, tmp_path / "index.html", width=420)
    assert driver.get_log("browser") == []
    assert driver.execute_script(CLIPPED) == []
    table = driver.find_element(By.ID, "expert-table")
    assert [button.text for button in table.find_elements(By.TAG_NAME, "button")] == ["expert", "channels kept"]
    assert len(driver.find_elements(By.CSS_SELECTOR, "#expert-bars .end")) == bare_view.experts
