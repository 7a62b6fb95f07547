"""Checkpoints in engines on GPUs: graphs, and two cards. Run by hand, because CI has no GPU."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.agreement import assert_agrees, stored_bytes_of_experts
from tests.serving.engine import checkpoint_path
from tests.serving.ranks import CROWD, finish, start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPE = "bfloat16"  # the kernels are made for it, and some attention supports no other
MEDIAN_BFLOAT16 = 0.02
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
# without Granite, whose loader in vLLM 0.26 stops at names of single experts
SERVED = [
    *("ragged_bf16", "ragged_w4a16", "ragged_gptq_a64", "ragged_shared_w4a16", "ragged_mixtral", "ragged_glm4"),
    *("ragged_asymmetric", "ragged_fp8", "ragged_fp8_exact", "ragged_olmoe", "ragged_ernie", "ragged_minimax"),
    *("ragged_deepseek", "ragged_deepseek_v2", "ragged_deepseek_v2_groups", "ragged_deepseek_v3"),
    "ragged_qwen3_next",
]
# exact widths in 16 bits: rows of down_proj are padded to eight channels; 8 bits: both ranks hold its scales
MOST_PADDING = {"ragged_bf16": 0.01, "ragged_fp8": 0.01}
SEVERAL_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def assert_right(path: Path, output: dict[str, Any]) -> None:
    """A prompt's tokens are as likely as in transformers, and decoded tokens as likely as when they are a prompt."""
    assert_agrees(path, output["prompt_logprobs"], DTYPE)
    assert_agrees(path, output["logprobs_in_crowd"], DTYPE)
    difference = torch.tensor(output["logprobs"]) - torch.tensor(output["logprobs_as_prompt"])
    assert difference.abs().median() <= MEDIAN_BFLOAT16


@pytest.mark.parametrize("name", SERVED)
def test_graphs(name: str) -> None:
    """Shared experts, with gates and without, and routers with removed experts are captured like the rest."""
    path = checkpoint_path(name)
    [found] = finish(start(path, GRAPHS))
    assert_right(path, found["output"])


@SEVERAL_CARDS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ragged_w4a16_a64", {"tensor_parallel_size": 2}),
        ("ragged_bf16", {"tensor_parallel_size": 2}),
        ("ragged_fp8", {"tensor_parallel_size": 2}),
        ("ragged_w4a16_a64", {"pipeline_parallel_size": 2}),
        ("ragged_shared_fp32", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("ragged_asymmetric", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_two_cards(name: str, options: dict[str, Any]) -> None:
    path = checkpoint_path(name)
    [found] = finish(start(path, TWO_CARDS | options, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert_right(path, found["output"])
    experts = [held for held, _ in found["bytes_held"]]
    stored = stored_bytes_of_experts(path, DTYPE)
    assert stored <= sum(experts) <= stored * (1 + MOST_PADDING.get(name, 0))
    assert "pipeline_parallel_size" in options or max(experts) <= 1.05 * sum(experts) / 2


@SEVERAL_CARDS
def test_two_data_parallel_cards() -> None:
    path = checkpoint_path("ragged_shared_w4a16")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    shared["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    found = finish(*(start(path, GRAPHS, **shared, VLLM_DP_RANK=rank, VLLM_DP_RANK_LOCAL=rank) for rank in ("0", "1")))
    for each in found:
        assert_right(path, each["output"])
    assert sum(held for each in found for held, _ in each["bytes_held"]) == stored_bytes_of_experts(path, DTYPE)
