"""The method that vLLM calls for experts, as far as that needs no engine; see ``test_engine.py`` for the rest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.experts import RaggedExpertsMethod, announce_slow_path
from moe_coverage_plugin.serving.ragged_weights import IDS_DTYPE, ROUTING_WEIGHT_DTYPE

NAME = "model.layers.1.mlp.experts"


def method(widths: list[int], ranks: dict[str, int] | None = None, **options: bool) -> RaggedExpertsMethod:
    """Our method for a layer that vLLM describes with some of its options."""
    parallel = replace(FusedMoEParallelConfig.make_no_parallel(), **(ranks or {}))
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
            moe_parallel_config=parallel,
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


@pytest.mark.parametrize("ranks", [{"dp_size": 2}, {"pcp_size": 2}, {}])
@pytest.mark.parametrize("widths", [[64, 32, 8, 128], [64, 0, 8, 128]])
def test_layers_whose_tokens_are_gathered_hide_the_mask_of_one_rank(widths: list[int], ranks: dict[str, int]) -> None:
    """Those without removed experts, too. One rank keeps its mask, however often weights are loaded."""
    masks: list[torch.Tensor | None] = []

    def choose(gating_output: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        masks.append(get_forward_context().is_padding if is_forward_context_available() else None)
        return gating_output.topk(topk)

    layer, router = method(widths, ranks), CustomRoutingRouter(2, 4, custom_routing_function=choose)
    layer.layer_name, layer._runners, layer._reads_checkpoint = NAME, {NAME: SimpleNamespace(router=router)}, False
    layer._prepare_router(torch.device("cpu"))
    prepared = router.select_experts
    layer._prepare_router(torch.device("cpu"))
    assert router.select_experts == prepared
    with override_forward_context(ForwardContext({}, {}, {}, is_padding=torch.zeros(3, dtype=torch.bool))):
        router.select_experts(hidden_states=torch.zeros(8, 4), router_logits=torch.randn(8, 4))
    assert [mask is None for mask in masks] == [bool(ranks)]


def test_slow_path_is_logged_once_per_reason(log: list[str]) -> None:
    for reason in ("no card", "no card", "odd groups", "no card"):
        announce_slow_path(reason)
    logged = [message for message in log if "plain torch" in message]
    assert [message.rpartition(": ")[2] for message in logged] == ["no card", "odd groups"]
    assert all(message.startswith("WARNING") for message in logged)
