"""The kernels as a torch operator."""

import pytest
import torch

from moe_coverage_plugin.serving.kernels.launch import ragged_experts
from moe_coverage_plugin.serving.kernels.operator import run_kernels, schema_arguments
from tests.serving.kernels.random_layers import RandomLayer

pytestmark = pytest.mark.slow

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("scheme", "bias"), [("plain", False), ("group-32", True), ("channel-zeros", False)])
def test_opcheck(device: torch.device, scheme: str, bias: bool) -> None:
    layer = RandomLayer(device, scheme, bias=bias)
    arguments = (*layer.inputs(2), *schema_arguments(layer.weights), "silu", False)
    torch.library.opcheck(torch.ops.moe_coverage.ragged_moe_kernels.default, arguments)


@pytest.mark.parametrize("scheme", ["plain", "group-32"])
def test_equals_ragged_experts(device: torch.device, scheme: str) -> None:
    layer = RandomLayer(device, scheme, bias=True)
    inputs = layer.inputs(5)
    found = run_kernels(*inputs, layer.weights, "gelu_tanh", True)
    assert torch.equal(found, ragged_experts(*inputs, layer.weights, "gelu_tanh", True))


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("scheme", ["plain-aligned", "group-64"])
def test_replays_in_a_cuda_graph_for_another_routing(device: torch.device, scheme: str, tokens: int) -> None:
    layer = RandomLayer(device, scheme)
    captured, later = layer.inputs(tokens), layer.inputs(tokens)
    run_kernels(*captured, layer.weights, "silu", False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_kernels(*captured, layer.weights, "silu", False)
    for tensor, value in zip(captured, later, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert torch.equal(found, run_kernels(*later, layer.weights, "silu", False))
