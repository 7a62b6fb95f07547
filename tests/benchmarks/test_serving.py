"""The tables of the serving benchmark; its run is tested in vLLM's environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.serving.render import expert_ranks_section, section


def figures(
    gigabytes: float, tokens_per_second: float, distinct: float | None = 126.0, experts: Sequence[int] = (9,)
) -> dict[str, Any]:
    return {
        "experts_run_by": ["Method"],
        "startup_seconds": 50.0,
        "loading_bytes": int(gigabytes * 1e9),
        "parameter_bytes": int(gigabytes * 1e9),
        "expert_bytes_by_rank": list(experts),
        "decode": [{"batch": 64, "tokens_per_second": tokens_per_second}],
        "prefill": {"tokens": 2048, "median_seconds": 0.05},
        "routing": {"tokens": 64, "distinct_experts": distinct, "if_even": 125.9},
    }


RECORD = {
    "command": "python -m benchmarks.serving",
    "seed": 3,
    "environment": {"card": "a card", "versions": {"vllm": "1", "torch": "2"}},
    "shape": {
        "num_hidden_layers": 48,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "hidden_size": 2048,
        "num_experts_per_tok": 8,
    },
    "request": {"new": 128, "prompt": 128, "enforce_eager": False, "tensor_parallel_size": 1},
    "variants": {"stock4": figures(16, 7500), "ours4": figures(12, 9000, None)},
}


def test_figures_and_ratios_are_rendered():
    text = section(RECORD)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| weights bytes | 16,000,000,000 | 12,000,000,000 |" in lines
    assert "| decode tokens/s, batch 64 | 7,500 | 9,000 |" in lines
    assert "| different experts of 64 tokens in a layer | 126.0 (125.9 if all were equally likely) | |" in lines
    assert "| weights bytes | 0.750 |" in lines
    assert "| decode tokens/s, batch 64 | 1.200 |" in lines
    assert "- Seed: 3." in lines
    assert "a card" in text


def test_kinds_of_ranks_are_named():
    for experts, expected in (
        (False, "2 of them."),
        (True, "2 of them, each with entire experts (expert parallelism)."),
    ):
        request = RECORD["request"] | {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
        assert f"- Card: a card, tensor parallelism over {expected}" in section(RECORD | {"request": request})
    # measured before the option existed
    assert "over 2 of them." in section(RECORD | {"request": RECORD["request"] | {"tensor_parallel_size": 2}})


def test_counts_of_ranks_are_rendered():
    load = {"counted": 1.25, "expected": 1.0, "by_number": 1.5}
    record = {
        **{key: RECORD[key] for key in ("command", "seed", "environment")},
        "checkpoint": "a model",
        "ranks": 2,
        "tokens": 8192,
        "by_rank": [{"bytes of experts": 1000, "experts": 3}, {"bytes of experts": 900, "experts": 2}],
        "ratios": {"tokens": load, "work": load | {"counted": 1.125}},
    }
    lines = [" ".join(line.split()) for line in expert_ranks_section(record).splitlines()]
    assert "- Card: a card, 2 ranks." in lines
    assert "- Checkpoint: a model; 8,192 tokens." in lines
    assert "| bytes of experts | 1,000 | 900 |" in lines
    assert "| busiest rank of each layer / mean: channels times tokens | 1.125 | 1.000 | 1.500 |" in lines
    assert "2 ranks of 2 data-parallel engines" in expert_ranks_section(record | {"data_parallel_size": 2})
