"""README and docs: sizes, links and the map of the code are right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "moe_coverage_plugin"
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
CONTRIBUTING = (REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def relative_links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor, empty if there is none, of every link that is not a URL."""
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


def section(title: str) -> str:
    """Text of a section of contributing.md, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#)", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Cells of the tables of a section, without their headers."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [index for index, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    return [row for index, row in enumerate(cells) if index not in rules and index + 1 not in rules]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_front_door_is_short() -> None:
    assert 4000 <= README.stat().st_size <= 8000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in relative_links(page):
        assert target.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {target.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_paragraph(page: Path) -> None:
    title, blank, first, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert re.match(r"[A-Z]", first), first


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target.resolve() for target, _ in relative_links(README)}
    pages = {page for page in PAGES if page.name != "README.md"}
    assert pages <= linked


def test_the_map_is_complete() -> None:
    """Every path in it exists, and every folder and single file of the package is in it."""
    paths = [path for row in rows("Map of the code") for path in code(row[0])]
    for path in paths:
        assert (REPOSITORY / path).exists(), path
    parts = {
        each.name
        for each in PACKAGE.iterdir()
        if (each.is_dir() or each.suffix == ".py") and not each.name.startswith("_")
    }
    assert {Path(path).name for path in paths} >= parts


def test_each_equation_is_where_the_map_says() -> None:
    homes = [code(row[1]) for row in rows("Where each equation is")]
    assert len(homes) > 10
    for file, name in homes:
        assert re.search(rf"^def {name}\(", (PACKAGE / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)


def test_every_file_that_raises_errors_is_in_the_map() -> None:
    homes = {
        home for row in rows("Where each error is raised") for home in code(row[1]) if home.endswith((".py", "/"))
    }
    raising = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if "raise CoverageError" in file.read_text(encoding="utf-8")
    }
    for file in raising:
        assert any(file == home or (home.endswith("/") and file.startswith(home)) for home in homes), file
    for home in homes:
        assert any(file.startswith(home) for file in raising), home
