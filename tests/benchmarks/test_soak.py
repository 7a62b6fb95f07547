"""Requests, figures and tables of the mixed load; its run is tested in vLLM's environment."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.markers import TITLE
from benchmarks.soak import render
from benchmarks.soak.figures import Answer, Sample, comparison, failures, memory
from benchmarks.soak.traffic import COMPARED, KINDS, SEVERAL, Traffic


@pytest.mark.parametrize("limit", [128, 4096])
def test_requests_have_all_kinds_and_fit_the_engine(limit: int):
    traffic = Traffic(0, 500, limit)
    requests = [traffic.draw() for _ in range(500)]
    assert Counter(each.kind for each in requests).keys() == KINDS.keys()
    for each in requests:
        assert 0 < len(each.prompt_ids) <= limit - each.new
        assert all(0 <= token < 500 for token in each.prompt_ids)
        assert each.new > 0
        assert each.answers == (SEVERAL if each.kind == "several" else 1)
        assert (each.sampling["temperature"] == 0) == (each.kind in COMPARED)
        assert (len(each.prompt_ids) >= limit // 2) == (each.kind == "long")
    assert 20 < sum(each.abort_after is not None for each in requests) < 80
    prefixes = [tuple(prefix) for prefix in traffic.prefixes]
    shared = sum(tuple(each.prompt_ids[: limit // 16]) in prefixes for each in requests)
    assert 80 < shared < 170


def test_requests_repeat_with_the_seed():
    def drawn(seed: int) -> list[Any]:
        traffic = Traffic(seed, 500, 128)
        return [traffic.draw() for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_memory_is_followed_after_the_warm_up():
    samples = [Sample(0, 10, 1000), Sample(60, 500, 300), Sample(120, 500, 310), Sample(180, 500, 320)]
    found = memory(samples, 60)
    assert found["device"] == {"first": 500, "last": 500, "most": 500, "slope_per_minute": 0.0, "growth": 0.0}
    assert found["host"]["slope_per_minute"] == pytest.approx(10)
    assert found["host"]["growth"] == pytest.approx(20)
    assert memory([Sample(0, None, 1), Sample(1, None, 1)], 0).keys() == {"host"}
    assert memory(samples[:1], 0) == {}


def test_answers_are_compared_up_to_the_first_difference():
    equal = Answer([1, 2], [-0.5, -1.0], [-0.5, -1.0], [1, 2], [-0.5, -1.0])
    exchanged = Answer([1, 3, 9], [-0.5, -0.7, -2.0], [-0.6, -0.71, -2.25], [1, 4, 5], [-0.6, -0.7, -0.1])
    found = comparison([equal, exchanged])
    assert (found["answers"], found["tokens"]) == (2, 5)
    assert (found["equal_answers"], found["tokens_before_difference"]) == (1, 3)
    assert found["worst_answer"] == pytest.approx(0.1)
    assert found["median_difference"] == pytest.approx(0.01)
    assert found["largest_gap"] == pytest.approx(0.01)
    assert comparison([equal])["largest_gap"] is None
    assert comparison([]) == {"answers": 0}


FIGURES: dict[str, Any] = {
    "requests": {"greedy": 40, "long": 10},
    "aborted": 7,
    "prompt_tokens": 12_345,
    "new_tokens": 678,
    "memory": {
        "device": {"first": 2**30, "last": 2**30 + 2**20, "most": 2**31, "slope_per_minute": 2**19, "growth": 2**20},
        "host": {"first": 2**31, "last": 2**31, "most": 2**31, "slope_per_minute": 0.0, "growth": 0.0},
    },
    "comparison": {
        "answers": 8,
        "tokens": 100,
        "median_difference": 0.01,
        "worst_answer": 0.03,
        "equal_answers": 6,
        "tokens_before_difference": 80,
        "largest_gap": 0.02,
    },
    "failures": [],
}
RECORD = {
    "command": "python -m benchmarks.soak",
    "seed": 3,
    "environment": {"card": "a card", "versions": {"vllm": "1", "torch": "2"}},
    "shape": {"num_hidden_layers": 48, "num_experts": 128},
    "request": {
        "at_once": 64,
        "minutes": 30,
        "warm_up_minutes": 6.0,
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "limits": {"tolerance": 0.1, "growth": 2**26},
    "checkpoints": {"stock4": {"error": "OutOfMemoryError: no room"}, "ours4": FIGURES},
}


def test_memory_that_grows_and_answers_that_differ_are_failures():
    assert failures(FIGURES, 0.1, 2**26) == []
    grown, different = failures(FIGURES, 0.02, 2**19)
    assert grown == "memory of the card grew by 1,048,576 bytes after the warm-up, more than 524,288"
    assert different == "log-probabilities of an answer differ by a median of 0.030, more than 0.02"
    not_a_number = FIGURES | {"comparison": {"answers": 1, "worst_answer": float("nan")}}
    assert len(failures(not_a_number, 0.1, 2**26)) == 1
    assert failures({"memory": {}, "comparison": {"answers": 0}}, 0.1, 0) == []


def test_results_are_written_between_markers(tmp_path: Path):
    file, page = tmp_path / "soak.json", tmp_path / "RESULTS.md"
    file.write_text(json.dumps(RECORD))
    render.write_results([file], page)
    text = page.read_text()
    assert text.startswith(TITLE)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "- Card: a card, tensor parallelism over 2 of them, each with entire experts (expert parallelism)." in lines
    assert "- stock4 failed: OutOfMemoryError: no room" in lines
    assert "| requests finished | 50 (40 greedy, 10 long) |" in lines
    assert "| memory of the device, MiB, first and last | 1,024 to 1,025 |" in lines
    assert "| memory of the device, MiB per minute | +0.500 |" in lines
    assert "| tokens before the first difference | 80 of 100 |" in lines
    assert render.line(FIGURES).startswith("requests finished 50 (40 greedy, 10 long); requests aborted 7;")
    assert render.line({"error": "Killed"}) == "Killed"
