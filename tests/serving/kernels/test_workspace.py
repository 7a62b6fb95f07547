"""Intermediate results stay below a bound; more tokens are computed in parts, with the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_coverage_plugin.serving.kernels import launch
from moe_coverage_plugin.serving.kernels.expert_table import make_table
from moe_coverage_plugin.serving.kernels.launch import (
    WORKSPACE_BYTES,
    ragged_experts,
    tokens_per_part,
    workspace_bytes,
)
from moe_coverage_plugin.serving.kernels.tiles import choose_plan
from moe_coverage_plugin.serving.kernels.weights import KernelWeights
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights
from tests.serving.kernels.random_layers import PLANS, TOP_K, RandomLayer

TOKENS = 40
# sorted pairs and tiles of experts whose last tile is not full
PADDING = 16_384


class Allocated:
    """Bytes of tensors that torch allocated without values and that are still in use.

    Attributes:
        most: the largest sum since the beginning.
    """

    def __init__(self) -> None:
        self.now = self.most = 0

    def counted(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_and_count(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            self._add(tensor.nbytes)
            weakref.finalize(tensor, self._add, -tensor.nbytes)
            return tensor

        return allocate_and_count

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Allocated:
    counter = Allocated()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, counter.counted(getattr(owner, name)))
    return counter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "plan"), [("plain", "tiled"), ("group-32", "tiled-swap"), ("float8", "tiled-swap")]
)
def test_parts_have_the_bits_of_the_entire_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, allocated: Allocated, scheme: str, plan: str
) -> None:
    layer = RandomLayer(device, scheme)
    inputs = layer.inputs(TOKENS)
    output = inputs[0].nbytes
    per_token = workspace_bytes(TOP_K, layer.weights, inputs[0].itemsize, PLANS[plan])
    expected = ragged_experts(*inputs, layer.weights, plan=PLANS[plan])
    entire, before = allocated.most, allocated.now
    monkeypatch.setattr(launch, "WORKSPACE_BYTES", 16 * per_token)
    allocated.most = before
    found = ragged_experts(*inputs, layer.weights, plan=PLANS[plan])
    assert torch.equal(found, expected)
    # three parts, of 16, 16 and 8 tokens
    assert allocated.most - before <= output + 16 * per_token + PADDING
    assert TOKENS * per_token - PADDING < entire - output <= TOKENS * per_token + PADDING


def deepseek_v3(bits: int) -> KernelWeights:
    """All shapes of a layer, but no weights."""
    experts, hidden, width = 256, 7168, 2048
    numel = experts * hidden * width // (2 if bits == 4 else 1)
    dtype = {16: torch.bfloat16, 8: torch.float8_e4m3fn, 4: torch.uint8}[bits]
    w2 = torch.empty(numel, dtype=dtype, device="meta")
    tensors = RaggedWeights(w2.repeat(2), w2, None, None, None, None, None, None)
    widths_E = [width] * experts
    units_E = [width // 128] * experts
    table_E4 = make_table(widths_E, units_E, units_E)
    return KernelWeights(tensors, table_E4, hidden, width, bits, 128 if bits == 4 else 0, 128)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("tokens", "most_parts"), [(1, 1), (8192, 1), (16_384, 2), (65_536, 6)])
def test_the_largest_published_layer(bits: int, tokens: int, most_parts: int) -> None:
    weights = deepseek_v3(bits)
    plan = choose_plan(tokens * 8, weights.experts, weights.hidden, weights.w2_numel, bits)
    part = tokens_per_part(tokens, 8, weights, 2, plan)
    assert part * workspace_bytes(8, weights, 2, plan) <= WORKSPACE_BYTES
    assert -(-tokens // part) <= most_parts
    assert part == tokens or part % 16 == 0
