"""Windows of calibration and evaluation texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.allocation.text import WINDOW, Source, calibration_pools, draw, evaluation_windows
from moe_coverage_plugin import CoverageError

# all token ids of a window are the number of the window
POOLS = {name: torch.arange(start, start + 10)[:, None].expand(10, WINDOW) for name, start in (("a", 0), ("b", 10))}


def drawn(corpus: str, count: int, seed: int) -> list[int]:
    return draw(POOLS, corpus, count, seed).ids_WS[:, 0].tolist()


@pytest.fixture
def tokenizer(model_path: Path):
    return AutoTokenizer.from_pretrained(model_path)


def test_drawn_windows_differ_and_are_equal_parts_of_all_corpora():
    found = drawn("all", 7, seed=0)
    assert len(set(found)) == 7
    assert [sum(number < 10 for number in found), sum(number >= 10 for number in found)] == [4, 3]
    assert set(drawn("b", 10, seed=0)) == set(range(10, 20))


def test_the_seed_determines_the_windows():
    assert drawn("a", 5, seed=1) == drawn("a", 5, seed=1)
    assert drawn("a", 5, seed=1) != drawn("a", 5, seed=2)
    assert draw(POOLS, "a", 5, 1).sha256 != draw(POOLS, "a", 5, 2).sha256


def test_calibration_text_must_not_overlap_the_evaluation_windows(model_path: Path, tokenizer):
    file = model_path / "calibration.txt"
    words = file.read_text().split()
    end = len(" ".join(words[: 2 * WINDOW]))
    found = evaluation_windows([Source("t", file)], [Source("c", file, end)], tokenizer, 2)
    assert tokenizer.decode(found["t"].ids_WS.flatten()).split() == words[: 2 * WINDOW]
    pool = calibration_pools([Source("c", file, end)], tokenizer)["c"]
    assert tokenizer.decode(pool.flatten()).split() == words[2 * WINDOW :]
    with pytest.raises(CoverageError, match=f"the first {end} characters are used for evaluation"):
        evaluation_windows([Source("t", file)], [Source("c", file, end - 1)], tokenizer, 2)


def test_a_text_shorter_than_a_window_is_an_error(model_path: Path, tokenizer, tmp_path: Path):
    (tmp_path / "short.txt").write_text("w3 w4")
    with pytest.raises(CoverageError, match="'short' has 2 tokens"):
        evaluation_windows([Source("short", tmp_path / "short.txt")], [], tokenizer, 2)
