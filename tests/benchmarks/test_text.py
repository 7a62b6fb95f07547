"""Windows to calibrate on and to measure on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.allocation.text import WINDOW, Source, calibration_pools, draw, evaluation_windows
from moe_coverage_plugin import CoverageError

# every window of a pool holds the window's own number
POOLS = {name: torch.arange(start, start + 10)[:, None].expand(10, WINDOW) for name, start in (("a", 0), ("b", 10))}


def drawn(corpus: str, count: int, seed: int) -> list[int]:
    return draw(POOLS, corpus, count, seed).ids_WS[:, 0].tolist()


@pytest.fixture
def tokenizer(model_path: Path):
    return AutoTokenizer.from_pretrained(model_path)


def test_windows_of_one_draw_differ_and_come_from_every_corpus_in_equal_parts():
    found = drawn("all", 7, seed=0)
    assert len(set(found)) == 7
    assert [sum(number < 10 for number in found), sum(number >= 10 for number in found)] == [4, 3]
    assert set(drawn("b", 10, seed=0)) == set(range(10, 20))


def test_a_seed_draws_the_same_and_another_does_not():
    assert drawn("a", 5, seed=1) == drawn("a", 5, seed=1)
    assert drawn("a", 5, seed=1) != drawn("a", 5, seed=2)
    assert draw(POOLS, "a", 5, 1).sha256 != draw(POOLS, "a", 5, 2).sha256


def test_first_windows_are_measured_and_none_of_them_is_calibrated_on(model_path: Path, tokenizer):
    file = model_path / "calibration.txt"
    words = file.read_text().split()
    end = len(" ".join(words[: 2 * WINDOW]))
    found = evaluation_windows([Source("t", file)], [Source("c", file, end)], tokenizer, 2)
    assert tokenizer.decode(found["t"].ids_WS.flatten()).split() == words[: 2 * WINDOW]
    pool = calibration_pools([Source("c", file, end)], tokenizer)["c"]
    assert tokenizer.decode(pool.flatten()).split() == words[2 * WINDOW :]
    with pytest.raises(CoverageError, match=f"the first {end} are measured on"):
        evaluation_windows([Source("t", file)], [Source("c", file, end - 1)], tokenizer, 2)


def test_a_text_without_a_window_is_refused(model_path: Path, tokenizer, tmp_path: Path):
    (tmp_path / "short.txt").write_text("w3 w4")
    with pytest.raises(CoverageError, match="'short' has 2 tokens"):
        evaluation_windows([Source("short", tmp_path / "short.txt")], [], tokenizer, 2)
