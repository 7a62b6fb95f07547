"""Experts of unequal width in one call of each projection, compared with one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.modeling import grouped_experts
from moe_coverage_plugin.modeling.grouped_experts import RaggedExperts
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers
from moe_coverage_plugin.modeling.slicing import prune_layer
from tests.modifiers.harness import offload_to_disk, open_linear, save_tiny

EXPERTS, CHANNELS = 8, 64
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": CHANNELS},
    # biases and another activation
    "gpt_oss": {"moe_intermediate_size": CHANNELS, "intermediate_size": CHANNELS, "num_local_experts": EXPERTS},
}
# of no alignment, a removed expert, and one width that only one expert has
UNEQUAL = [64, 13, 0, 32, 13, 1, 57, 32]


def pruned(directory: Path, family: str, widths: Sequence[int]) -> tuple[Any, MoELayer]:
    """A bfloat16 model and its first layer, with the first channels of each expert."""
    model = open_linear(save_tiny(directory / family, family, **FAMILIES[family])).bfloat16()
    layer = find_moe_layers(model)[0]
    prune_layer(layer, [torch.arange(width) for width in widths])
    return model, layer


def batch(layer: MoELayer, experts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that are routed to two of the given experts each."""
    generator = torch.Generator().manual_seed(0)
    hidden = next(layer.mlps[0].parameters()).shape[1]
    ids_TK = torch.stack([torch.randperm(len(experts), generator=generator)[:2] for _ in range(21)])
    weights_TK = torch.rand(21, 2, generator=generator).bfloat16()
    x_TH = torch.randn(21, hidden, generator=generator).bfloat16()
    return x_TH, torch.tensor(experts)[ids_TK], weights_TK


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("experts", [[0, 1, 3, 4, 5, 6, 7], [1, 5]], ids=["all", "two"])
@torch.no_grad()
def test_one_call_equals_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, experts: list[int]
):
    """Also if experts get no token."""
    model, layer = pruned(tmp_path, family, UNEQUAL)
    values = batch(layer, experts)
    ragged = RaggedExperts(layer)
    expected_TH = ragged.forward(*values)
    monkeypatch.setattr(grouped_experts, "_in_one_call", lambda _: True)
    found_TH = ragged.forward(*values)
    # rounding in bfloat16 of sums in another order
    assert float((found_TH - expected_TH).float().norm()) < 0.01 * float(expected_TH.float().norm())
    offload_to_disk(model, tmp_path)
    offloaded = RaggedExperts(find_moe_layers(model)[0])
    assert torch.equal(offloaded.forward(*values), found_TH)


@torch.no_grad()
def test_padded_weights_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, layer = pruned(tmp_path, "qwen3_moe", UNEQUAL)
    copied: list[str] = []
    init = grouped_experts.PaddedProjection.__init__
    monkeypatch.setattr(grouped_experts, "_in_one_call", lambda _: True)
    monkeypatch.setattr(
        grouped_experts.PaddedProjection,
        "__init__",
        lambda self, *args: (copied.append(args[0]), init(self, *args))[1],
    )
    ragged = RaggedExperts(layer)
    for _ in range(3):
        ragged.forward(*batch(layer, [0, 1, 3]))
    assert sorted(copied) == ["down_proj", "gate_proj", "up_proj"]
