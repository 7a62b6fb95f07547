"""Ranks that hold entire experts: experts of other ranks have width 0 and get no tile, whatever tokens choose them."""

import pytest
import torch

from moe_coverage_plugin.serving.kernels.launch import ragged_experts
from moe_coverage_plugin.serving.kernels.tiles import LaunchPlan
from tests.serving.kernels.random_layers import DECODE, SCHEMES, TILED, TOP_K, RandomLayer
from tests.serving.random_experts import RaggedExperts

pytestmark = pytest.mark.slow

both_paths = pytest.mark.parametrize("plan", [DECODE, TILED], ids=["decode", "tiled"])


def ranks_of(device: torch.device, scheme: str, bias: bool = False) -> list[RandomLayer]:
    """Two ranks that hold every second expert, and one that holds none."""
    quantization, widths, hidden = SCHEMES[scheme]
    experts = RaggedExperts(widths, hidden, quantization, torch.float32, bias)
    experts.holders = [expert // 2 % 2 for expert in range(len(widths))]
    return [RandomLayer(device, experts=experts, rank=rank, world_size=3) for rank in range(3)]


@both_paths
@pytest.mark.parametrize(
    ("scheme", "bias"), [("plain", False), ("group-32", False), ("channel-zeros", True), ("float8", True)]
)
def test_outputs_sum_to_the_output(device: torch.device, scheme: str, bias: bool, plan: LaunchPlan) -> None:
    ranks = ranks_of(device, scheme, bias)
    assert ranks[2].weights.max_width == 0 < min(layer.weights.max_width for layer in ranks[:2])
    inputs = ranks[0].inputs(3)
    parts = [ragged_experts(*inputs, layer.weights, plan=plan).cpu() for layer in ranks]
    assert not parts[2].any()
    ranks[0].assert_close(sum(parts), ranks[0].reference(*inputs))


@both_paths
@pytest.mark.parametrize("scheme", ["group-32-zeros", "float8"])
def test_all_tokens_choose_experts_of_another_rank(device: torch.device, scheme: str, plan: LaunchPlan) -> None:
    first, second, _ = ranks_of(device, scheme)
    x_TH, weights_TK, _ = first.inputs(3)
    ids_TK = torch.full((3, TOP_K), 2, dtype=torch.int32, device=device)
    assert first.experts.holders[2] == 1
    assert not ragged_experts(x_TH, weights_TK, ids_TK, first.weights, plan=plan).any()
    found = ragged_experts(x_TH, weights_TK, ids_TK, second.weights, plan=plan)
    first.assert_close(found, first.reference(x_TH, weights_TK, ids_TK))
