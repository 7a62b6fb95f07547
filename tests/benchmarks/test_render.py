"""Tables of rows in RESULTS.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.allocation.equal_bytes import lost_to_other_bits, lost_to_same_bits
from benchmarks.allocation.render import BEGIN, END, section, write_results
from benchmarks.allocation.rows import Row, append_row
from moe_coverage_plugin import CoverageError


def row(table: str, method: str, sparsity: float, megabytes: float, loss: float, bits: int = 16, seed: int = 0) -> Row:
    return Row(
        model="tiny",
        table=table,
        name=method,
        method=method,
        sparsity=sparsity,
        bits=bits,
        seed=seed,
        bytes=int(megabytes * 1e6),
        sparse_bytes=None,
        loss=loss,
        losses={"wiki": loss},
        refusal=None,
        removed=sparsity,
        removed_experts=0,
        recipe={},
        calibration=f"c4: 96 windows of 512 tokens, seed {seed}",
        calibration_sha256=str(seed),
        evaluation="wiki: the first 24 windows of 512 tokens",
        evaluation_sha256="e",
        command="python -m benchmarks.allocation",
        device="card",
        dtype="float32",
        versions={"torch": "2"},
        seconds=1.0,
        scoring_seconds=0.0,
    )


BASE = row("unpruned", "unpruned", 0.0, 20, 2.0)
SWEEP = [
    row("sweep", "unpruned", 0.0, 20, 2.0),
    row("sweep", "unpruned", 0.0, 6, 2.05, bits=4),
    row("sweep", "recommended", 0.25, 16, 2.1),
    row("sweep", "recommended", 0.75, 8, 3.1),
    row("sweep", "REAP", 0.25, 16, 2.2),
    row("sweep", "REAP", 0.5, 12, 2.5),
]


def cells(text: str) -> list[list[str]]:
    """Cells of all table rows in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_repeated_rows_show_mean_and_deviation():
    losses = {0: 2.1, 1: 2.2, 2: 2.3}
    text = section([BASE, *(row("main", "paper", 0.25, 16, loss, seed=seed) for seed, loss in losses.items())])
    assert ["paper", "25 %", "16", "16.00", "2.2000 ± 0.1000", "+0.2000 ± 0.1000"] in cells(text)
    assert "seeds 0, 1, 2" in text


def test_baselines_are_compared_with_the_curve_at_their_bytes():
    # REAP has loss 2.5 at 12 MB; linear interpolation between 2.1 at 16 MB and 3.1 at 8 MB is 2.6 there
    assert lost_to_same_bits(SWEEP, "recommended") == ["REAP 50 % x 16 bits (12.00 MB): 2.5000 against 2.6000"]
    ours = ["recommended 25 % x 16 bits (16.00 MB), 2.1000: unpruned x 4 bits (6.00 MB), 2.0500"]
    theirs = ["recommended 75 % x 16 bits (8.00 MB), 3.1000: unpruned x 4 bits (6.00 MB), 2.0500"]
    assert lost_to_other_bits(SWEEP, "recommended") == ours + theirs


def test_tables_list_rows_in_the_order_of_the_plan():
    """Workers finish them in any order."""
    names = ("uniform width", "paper", "recommended", "REAP")
    text = section([BASE, *(row("main", name, 0.25, 16, 2.2) for name in ("other", *reversed(names)))])
    assert [cell[0] for cell in cells(text)[2:]] == [*names, "other"]


def test_sweep_lists_baselines_better_than_the_recommended_recipe():
    text = section([BASE, *SWEEP])
    assert "- REAP 50 % x 16 bits (12.00 MB): 2.5000 against 2.6000" in text
    assert ["REAP", "+0.2000 (16.00)", "+0.5000 (12.00)", ""] in cells(text)


def test_text_around_the_tables_is_unchanged(tmp_path: Path):
    results, page = tmp_path / "rows.jsonl", tmp_path / "RESULTS.md"
    append_row(results, BASE)
    write_results([results], page)
    page.write_text(page.read_text().replace(BEGIN, f"Mine.\n\n{BEGIN}") + "\nMine too.\n")
    append_row(results, row("main", "paper", 0.25, 16, 2.2))
    write_results([results], page)
    once = page.read_text()
    assert once.index("Mine.") < once.index(BEGIN) < once.index("| paper") < once.index(END) < once.index("Mine too.")
    write_results([results], page)
    assert page.read_text() == once


def test_rows_that_cannot_be_compared_are_errors(tmp_path: Path):
    page = tmp_path / "RESULTS.md"
    with pytest.raises(CoverageError, match="no rows, measure first"):
        write_results([tmp_path / "none.jsonl"], page)
    with pytest.raises(CoverageError, match="several evaluation texts"):
        section([BASE, replace(BASE, evaluation_sha256="other")])
    with pytest.raises(CoverageError, match="unpruned"):
        section([row("main", "paper", 0.25, 16, 2.2)])
    append_row(tmp_path / "rows.jsonl", BASE)
    page.write_text("no markers")
    with pytest.raises(CoverageError, match="lacks the lines"):
        write_results([tmp_path / "rows.jsonl"], page)


def test_rows_of_own_text_are_listed_by_text():
    base = replace(BASE, losses={"wiki": 1.0, "code": 3.0})
    found = [
        replace(
            row("own", "own: obs, refit all", 0.5, 10, 2.0 + rise, seed=seed),
            losses={"wiki": 1.0, "code": 3 + 2 * rise},
        )
        for seed, rise in enumerate((0.1, 0.3))
    ]
    header, _, line = cells(section([base, *found]))
    assert header == ["name", "sparsity", "bits", "MB", "rise", "wiki", "code"]
    assert line[-3:] == ["+0.2000 ± 0.1414", "+0.0000 ± 0.0000", "+0.4000 ± 0.2828"]


def test_divergences_are_listed_where_they_were_measured():
    base = replace(BASE, losses={"wiki": 1.0, "code": 3.0})
    older = row("own", "own: older", 0.5, 10, 2.1)
    newer = [
        replace(row("own", "own: newer", 0.5, 10, 2.1, seed=seed), divergences={"wiki": value, "code": 3 * value})
        for seed, value in enumerate((0.1, 0.3))
    ]
    rows = [replace(each, losses={"wiki": 1.0, "code": 3.0}) for each in (older, *newer)]
    header, _, first, second = cells(section([base, *rows]))
    assert header[-1] == "divergence"
    assert first[-1] == ""
    assert second[-1] == "0.4000 ± 0.2828"
