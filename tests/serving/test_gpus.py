"""Checkpoints in engines on GPUs: graphs, and two cards. Run by hand, because CI has no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version

from tests.serving.agreement import TIMES_ROUNDING, agreement, assert_agrees, stored_bytes_of_experts
from tests.serving.engine import checkpoint_path
from tests.serving.ranks import CROWD, assert_two_ranks_counted, finish, start, start_data_parallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPE = "bfloat16"  # the kernels are made for it, and some attention supports no other
MEDIAN_BFLOAT16 = 0.02
# the last bit of a value may decide to which of two 8-bit floats it is rounded
MEDIAN_FLOAT8 = 0.05
SHARED_CARD = {
    "dtype": DTYPE,
    "max_num_seqs": CROWD,
    # several engines may share a card
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 2**28,
    # for gated delta rules; the kernels of flashinfer would be compiled first
    "gdn_prefill_backend": "triton",
}
GRAPHS = SHARED_CARD | {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 64]}}
TWO_CARDS = GRAPHS | {"distributed_executor_backend": "mp"}
SERVED = [
    *("ragged_bf16", "ragged_w4a16", "ragged_gptq_a64", "ragged_by_channel", "ragged_asymmetric", "padded_w4a16"),
    *("ragged_fp8", "ragged_fp8_exact", "ragged_float8_attention", "ragged_shared_w4a16", "ragged_mixtral"),
    *("ragged_glm4", "ragged_olmoe", "ragged_ernie", "ragged_minimax", "ragged_deepseek", "ragged_deepseek_v2"),
    *("ragged_deepseek_v2_groups", "ragged_deepseek_v3", "ragged_qwen3_next"),
]
if Version(vllm.__version__) > Version("0.27"):
    # the loader of 0.26 stops at names of single experts
    SERVED += ["ragged_granite", "ragged_granite_w4a16"]
# exact widths in 16 bits: rows of down_proj are padded to eight channels; 8 bits: both ranks hold its scales; zero
# points take two bytes each, and half a byte in a checkpoint
MOST_PADDING = {"ragged_bf16": 0.01, "ragged_fp8": 0.01, "ragged_asymmetric": 0.03}
EXPERTS = {"enable_expert_parallel": True}
# each on a card of its own
TWO_RANKS = 2 * [{"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}]
SEVERAL_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def assert_right(path: Path, output: dict[str, Any]) -> None:
    """A prompt's tokens are as likely as in transformers, and decoded tokens as likely as when they are a prompt."""
    assert_agrees(path, output["prompt_logprobs"], DTYPE)
    assert_agrees(path, output["logprobs_in_crowd"], DTYPE)
    difference = torch.tensor(output["logprobs"]) - torch.tensor(output["logprobs_as_prompt"])
    assert difference.abs().median() <= (MEDIAN_FLOAT8 if rounds_activations(path) else MEDIAN_BFLOAT16)


def rounds_activations(path: Path) -> bool:
    """Whether vLLM rounds inputs of linear layers to 8-bit floats."""
    groups = json.loads((path / "config.json").read_text()).get("quantization_config", {}).get("config_groups", {})
    return any(group["input_activations"] for group in groups.values())


@pytest.mark.parametrize("name", SERVED)
def test_graphs(name: str) -> None:
    """Shared experts, with gates and without, and routers with removed experts are captured like the rest."""
    path = checkpoint_path(name)
    [found] = finish(start(path, GRAPHS))
    assert_right(path, found["output"])


def assert_like_one_card(path: Path, found: dict[str, Any], one: dict[str, Any]) -> None:
    """Sums are in another order, which may change as much as rounding changes in transformers, in each of both."""
    for kind in ("prompt_logprobs", "logprobs_in_crowd"):
        rounding = agreement(path, found[kind], DTYPE)["of_transformers"]["median"]
        difference = torch.tensor(found[kind]) - torch.tensor(one[kind])
        assert difference.abs().median() <= TIMES_ROUNDING * rounding, kind


def assert_shared(name: str, held: list[int], imbalance: float) -> None:
    """Ranks hold the stored bytes of experts together, and each of two about half of them."""
    stored = stored_bytes_of_experts(checkpoint_path(name), DTYPE)
    assert stored <= sum(held) <= stored * (1 + MOST_PADDING.get(name, 0))
    assert max(held) <= (1 + imbalance) * sum(held) / 2


@SEVERAL_CARDS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ragged_w4a16_a64", {"tensor_parallel_size": 2}),
        ("ragged_bf16", {"tensor_parallel_size": 2}),
        ("ragged_fp8", {"tensor_parallel_size": 2}),
        ("ragged_w4a16_a64", {"pipeline_parallel_size": 2}),
        ("ragged_shared_fp32", EXPERTS | {"tensor_parallel_size": 2}),
        ("ragged_asymmetric", EXPERTS | {"tensor_parallel_size": 2}),
        ("ragged_w4a16_a64", EXPERTS | {"tensor_parallel_size": 2}),
        ("ragged_fp8", EXPERTS | {"tensor_parallel_size": 2}),
    ],
)
def test_two_cards(name: str, options: dict[str, Any]) -> None:
    path = checkpoint_path(name)
    two, one = finish(
        start(path, TWO_CARDS | options, VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        start(path, GRAPHS),
    )
    assert_right(path, two["output"])
    assert_like_one_card(path, two["output"], one["output"])
    # of three layers, the first rank of a pipeline has two
    assert_shared(name, [held for held, _ in two["bytes_held"]], 1.0 if "pipeline_parallel_size" in options else 0.05)


@SEVERAL_CARDS
@pytest.mark.parametrize(
    ("name", "options"),
    [("ragged_shared_w4a16", {}), ("ragged_shared_w4a16", EXPERTS), ("ragged_bf16", EXPERTS), ("ragged_fp8", EXPERTS)],
)
def test_two_data_parallel_cards(name: str, options: dict[str, Any]) -> None:
    """Each rank sends a different number of requests, so one computes empty batches at the end."""
    path = checkpoint_path(name)
    *found, one = finish(*start_data_parallel(path, GRAPHS | options, TWO_RANKS), start(path, GRAPHS))
    for each in found:
        assert_right(path, each["output"])
    assert_like_one_card(path, found[0]["output"], one["output"])
    assert_shared(name, [held for each in found for held, _ in each["bytes_held"]], 0.2)


@SEVERAL_CARDS
def test_two_data_parallel_cards_compute_the_tokens_of_each_other() -> None:
    """Without graphs, whose replays are not counted."""
    path = checkpoint_path("ragged_shared_w4a16")
    found = finish(*start_data_parallel(path, SHARED_CARD | EXPERTS, TWO_RANKS))
    assert_two_ranks_counted(path, [each["counted"][0] for each in found])
