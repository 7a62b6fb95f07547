"""The method that vLLM calls for experts, as far as that needs no engine; see ``test_engine.py`` for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.experts import RaggedExpertsMethod, announce_slow_path
from moe_coverage_plugin.serving.ragged_weights import IDS_DTYPE, ROUTING_WEIGHT_DTYPE

NAME = "model.layers.1.mlp.experts"


def method(widths: list[int], **options: bool) -> RaggedExpertsMethod:
    """Our method for a layer that vLLM describes with some of its options."""
    with set_current_vllm_config(VllmConfig()):
        moe = FusedMoEConfig(
            num_experts=len(widths),
            experts_per_token=2,
            hidden_dim=128,
            intermediate_size=128,
            num_local_experts=len(widths),
            num_logical_experts=len(widths),
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Default,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            **options,  # pyright: ignore[reportArgumentType]  # one of its flags
        )
    return RaggedExpertsMethod(moe, NAME, widths, ExpertScheme())


def test_experts_chosen_by_a_table_cannot_be_removed() -> None:
    """Hash-routed layers select experts by token id, so a mask of logits keeps no token from a removed expert."""
    with pytest.raises(CoverageError, match=rf"{NAME} lacks 2 of 4 experts, .* table of token ids.*layout='padded'"):
        method([64, 0, 0, 128], has_hash_routing=True)
    assert method([64, 32, 8, 128], has_hash_routing=True).widths_E == [64, 32, 8, 128]
    assert method([64, 0, 0, 128]).widths_E == [64, 0, 0, 128]


def test_routers_deliver_the_dtypes_that_kernels_are_compiled_for() -> None:
    """Also a model's own function that computes in others, as vLLM's runner calls it."""

    def choose(gating_output: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return gating_output.sigmoid().topk(topk)

    router = CustomRoutingRouter(2, 4, custom_routing_function=choose)
    logits = torch.randn(3, 4, dtype=torch.bfloat16)
    asked = method([64, 32, 8, 128]).topk_indices_dtype
    weights, ids = router.select_experts(torch.zeros(3, 8), logits, topk_indices_dtype=asked)
    assert (weights.dtype, ids.dtype) == (ROUTING_WEIGHT_DTYPE, IDS_DTYPE)


def test_slow_path_is_logged_once_per_reason(log: list[str]) -> None:
    for reason in ("no card", "no card", "odd groups", "no card"):
        announce_slow_path(reason)
    logged = [message for message in log if "plain torch" in message]
    assert [message.rpartition(": ")[2] for message in logged] == ["no card", "odd groups"]
    assert all(message.startswith("WARNING") for message in logged)
