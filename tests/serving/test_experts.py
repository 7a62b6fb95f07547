"""The method that vLLM calls for experts, as far as that needs no engine; see ``test_engine.py`` for the rest."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.experts import RaggedExpertsMethod, announce_slow_path

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


def test_slow_path_is_logged_once_per_reason(log: list[str]) -> None:
    for reason in ("no card", "no card", "odd groups", "no card"):
        announce_slow_path(reason)
    logged = [message for message in log if "plain torch" in message]
    assert [message.rpartition(": ")[2] for message in logged] == ["no card", "odd groups"]
    assert all(message.startswith("WARNING") for message in logged)
