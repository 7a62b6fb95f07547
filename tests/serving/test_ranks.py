"""Ranks of every kind give the output of one rank, and each rank holds only its part of the experts."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from moe_coverage_plugin.cli.checkpoint import read_checkpoint
from moe_coverage_plugin.cli.inspection import _summary
from moe_coverage_plugin.manifest import Manifest
from moe_coverage_plugin.serving import register
from moe_coverage_plugin.serving.compat import NO_ONE_WIDTH
from moe_coverage_plugin.serving.config import CoverageConfig
from tests.serving.agreement import LARGEST_FLOAT32, assert_agrees, stored_bytes_of_experts
from tests.serving.engine import checkpoint_path, open_engine
from tests.serving.ranks import (
    assert_held_once,
    assert_two_ranks_counted,
    finish,
    generate,
    pairs_of_token_and_expert,
    prompts,
    start,
    start_data_parallel,
)

pytestmark = pytest.mark.engine

CORES = sorted(os.sched_getaffinity(0))
IN_PROCESSES = {"distributed_executor_backend": "mp"}


def one_rank(path: Path, count: int) -> list[dict[str, Any]]:
    """Outputs of an engine in this process for the first prompts."""
    llm = open_engine(path)
    outputs = [generate(llm, prompt_ids, number) for number, prompt_ids in enumerate(prompts(path)[:count])]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return outputs


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tokens"] == expected["tokens"]
    for kind in ("logprobs", "prompt_logprobs"):
        assert (torch.tensor(found[kind]) - torch.tensor(expected[kind])).abs().max() <= LARGEST_FLOAT32


def test_pipeline_of_two_ranks() -> None:
    path = checkpoint_path("ragged_w4a16_a64")
    process = start(
        path,
        IN_PROCESSES | {"pipeline_parallel_size": 2},
        VLLM_CPU_OMP_THREADS_BIND=f"{CORES[0]}|{CORES[-1]}",
    )
    [expected] = one_rank(path, 1)
    [found] = finish(process)
    assert_equal(found["output"], expected)
    experts, layers = zip(*found["bytes_held"], strict=True)
    assert sum(experts) == stored_bytes_of_experts(path)
    assert 0 < experts[1] < experts[0] < layers[0]  # two layers, and one


def test_tensor_parallel_ranks_that_hold_entire_experts() -> None:
    """Experts of other ranks take no memory; attention and shared experts are still split, and summed once."""
    paths = [checkpoint_path(name) for name in ("ragged_shared_fp32", "ragged_asymmetric")]
    process = start(
        paths,
        IN_PROCESSES | {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        VLLM_CPU_OMP_THREADS_BIND=f"{CORES[0]}|{CORES[-1]}",
    )
    for path, each in zip(paths, finish(process), strict=True):
        output = each["output"]
        assert_agrees(path, output["prompt_logprobs"])
        decoded = torch.tensor(output["logprobs"]) - torch.tensor(output["logprobs_as_prompt"])
        assert decoded.abs().max() <= LARGEST_FLOAT32
        experts = [held for held, _ in each["bytes_held"]]
        assert sum(experts) == stored_bytes_of_experts(path)
        # the command shows the placement that the engine computes
        ratio = max(experts) * 2 / sum(experts)
        # of so small a model, one block of channels is 0.03 of the mean rank
        assert ratio < 1.03
        shown = _summary(read_checkpoint(path))["expert_parallel"]
        assert 2 in shown["legal"]
        assert [each["bytes"] for ranks, each in shown["balance"].items() if ranks == "2"] in ([ratio], [])
        one, two = each["counted"]
        assert_held_once(path, [one, two])
        for name, layer in one.items():
            assert layer["tokens"] == two[name]["tokens"]
            assert sum(layer["tokens"]) == pairs_of_token_and_expert(path, 0)


@pytest.mark.parametrize(("ranks", "options"), [(3, {}), (2, {"enable_expert_parallel": True})])
def test_data_parallel_ranks_beside_shared_experts(ranks: int, options: dict[str, Any]) -> None:
    """Three divide neither the width of an expert nor its quantization groups; two hold entire experts."""
    path = checkpoint_path("ragged_shared_w4a16")
    cores = [{"VLLM_CPU_OMP_THREADS_BIND": str(CORES[rank % len(CORES)])} for rank in range(ranks)]
    found = finish(*start_data_parallel(path, options, cores))
    expected = one_rank(path, ranks)
    for each, alone in zip(found, expected, strict=True):
        assert_equal(each["output"], alone)
        assert_agrees(path, each["output"]["prompt_logprobs"])
    [experts] = zip(*([held for held, _ in each["bytes_held"]] for each in found), strict=True)
    assert sum(experts) == stored_bytes_of_experts(path)
    assert max(experts) < 1.2 * sum(experts) / ranks
    if options:
        assert_two_ranks_counted(path, [each["counted"][0] for each in found])


def test_three_ranks_that_do_not_divide_the_width() -> None:
    path = checkpoint_path("ragged_three_ranks")
    process = start(
        path,
        IN_PROCESSES | {"tensor_parallel_size": 3},
        VLLM_CPU_OMP_THREADS_BIND="|".join(str(CORES[rank % len(CORES)]) for rank in range(3)),
    )
    [found] = finish(process)
    assert_agrees(path, found["output"]["prompt_logprobs"])
    experts = [held for held, _ in found["bytes_held"]]
    assert sum(experts) == stored_bytes_of_experts(path)
    assert max(experts) <= 1.05 * sum(experts) / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"data_parallel_size is 2, .* cannot gather .* --tensor-parallel-size"),
        ({"all2all_backend": "deepep_v2"}, r"all2all_backend is 'deepep_v2', .* serve without --all2all-backend"),
    ],
)
def test_data_parallel_ranks_that_cannot_gather_tokens(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        open_engine(checkpoint_path("ragged_fp32"), **options)


def description(width: int, ranks: int) -> FusedMoEConfig:
    """vLLM's description of a layer with experts."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_size = ranks
    return FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=128,
        intermediate_size=width,
        num_local_experts=8,
        num_logical_experts=8,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )


def coverage_config(layout: str) -> CoverageConfig:
    config = object.__new__(CoverageConfig)
    config.manifest = Manifest(layout, 512, {"model.layers.0.mlp.experts": [256] * 8})  # pyright: ignore[reportArgumentType]  # parametrized
    return config


@pytest.mark.parametrize(
    ("quantization", "ranks", "on_each"),
    [
        (coverage_config("ragged"), 2, 256),
        (coverage_config("ragged"), 3, NO_ONE_WIDTH),
        (None, 2, 256),
    ],
)
def test_width_of_a_layer_on_each_rank(quantization: CoverageConfig | None, ranks: int, on_each: int) -> None:
    register()
    vllm_config = VllmConfig()
    vllm_config.quant_config = quantization
    with set_current_vllm_config(vllm_config):
        layer = description(512, ranks)
    assert layer.intermediate_size == 512
    assert layer.intermediate_size_per_partition == layer.intermediate_size_per_partition_unpadded == on_each


@pytest.mark.parametrize("quantization", [None, coverage_config("uniform"), SimpleNamespace()])
def test_experts_of_one_width_are_still_divided(quantization: Any) -> None:
    register()
    vllm_config = VllmConfig()
    vllm_config.quant_config = quantization
    with set_current_vllm_config(vllm_config), pytest.raises(AssertionError):
        description(512, 3)


def test_stock_method_cannot_take_a_layer_without_one_width() -> None:
    register()
    vllm_config = VllmConfig()
    vllm_config.quant_config = coverage_config("ragged")
    with set_current_vllm_config(vllm_config):
        layer = description(512, 3)
        stock = UnquantizedFusedMoEMethod(layer)
        with pytest.raises(RuntimeError, match="negative dimension"):
            stock.create_weights(torch.nn.Module(), 8, 128, layer.intermediate_size_per_partition, torch.bfloat16)
