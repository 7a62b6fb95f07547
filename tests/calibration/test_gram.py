"""Gram matrices of experts, compared with one outer product for each token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.calibration.gram import channel_grams
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.core.reconstruction import gram
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling import grouped_experts
from moe_coverage_plugin.modeling.grouped_experts import ExpertFunction
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.calibration.brute_force import (
    CHANNELS,
    EXPERTS,
    batches_of,
    open_stock,
    padded_with_prompts,
    save_float64,
)
from tests.calibration.routed_rows import inputs_of, rows_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def model(request, tmp_path_factory):
    width = {"intermediate_size": CHANNELS, "num_local_experts": EXPERTS} if request.param == "gpt_oss" else {}
    return open_stock(save_float64(tmp_path_factory.mktemp("source"), request.param, **width), linear=True)


def data(size: int) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Padded batches, and flags of held-back tokens without any order."""
    batches = batches_of(padded_with_prompts(labelled=False), size)
    generator = torch.Generator().manual_seed(0)
    return batches, [torch.rand(batch["input_ids"].numel(), generator=generator) < 0.3 for batch in batches]


@pytest.mark.parametrize("size", [1, 3])
def test_sums_of_each_expert_and_part_equal_loops(model, size: int):
    """Of some experts in any order."""
    batches, held = data(size)
    rows_LE = rows_of(model, batches, held)
    experts = [5, 0, 3, 7]
    for layer, rows_E in zip(find_moe_layers(model), rows_LE, strict=True):
        expected_2DII = torch.zeros(2, len(experts), CHANNELS, CHANNELS, dtype=torch.float64)
        for position, expert in enumerate(experts):
            for row in rows_E[expert]:
                expected_2DII[int(row.held), position] += row.weight**2 * torch.outer(row.a_I, row.a_I)
        found_2DII = channel_grams(layer, experts, inputs_of(model, layer, batches, held))
        torch.testing.assert_close(found_2DII, expected_2DII, rtol=1e-9, atol=1e-12)
        assert bool(found_2DII.any())


@pytest.mark.parametrize("flag", [False, True])
def test_all_tokens_in_one_part(model, flag: bool):
    batches, held = data(2)
    layer = find_moe_layers(model)[0]
    inputs = inputs_of(model, layer, batches, [torch.full_like(each, flag) for each in held])
    grams_2DII = channel_grams(layer, range(EXPERTS), inputs)
    assert not grams_2DII[1 - int(flag)].any()
    assert bool(grams_2DII[int(flag)].any())


def test_experts_that_no_token_reaches_have_zeros(model):
    """One token reaches two experts; a batch of padding reaches none."""
    batch = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])}
    layer = find_moe_layers(model)[0]
    inputs = inputs_of(model, layer, [batch], [torch.tensor([True])])
    grams_2EII = channel_grams(layer, range(EXPERTS), inputs)
    assert not grams_2EII[0].any()
    assert torch.equal(grams_2EII[1].diagonal(dim1=1, dim2=2).sum(-1) > 0, inputs.count_tokens() > 0)
    empty = inputs_of(model, layer, [batch | {"attention_mask": torch.tensor([[0]])}], [torch.tensor([True])])
    nothing_2EII = channel_grams(layer, range(EXPERTS), empty)
    assert nothing_2EII.shape == (2, EXPERTS, CHANNELS, CHANNELS)
    assert not nothing_2EII.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_float32_or_wider(tmp_path, dtype: torch.dtype):
    model = open_stock(save_float64(tmp_path / "model", "qwen3_moe"), linear=True).to(dtype)
    batches, held = data(2)
    layer = find_moe_layers(model)[0]
    assert channel_grams(layer, [0, 1], inputs_of(model, layer, batches, held)).dtype == torch.float32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("held", [False, True])
def test_activations_that_are_not_finite_name_the_expert(tmp_path, value: float, held: bool):
    """In the fitted and in the held-back part."""
    model = open_stock(save_float64(tmp_path / "model", "qwen3_moe"), linear=True)
    layer = find_moe_layers(model)[1]
    batches, flags = data(2)
    with torch.no_grad():
        layer.mlps[3].up_proj.weight[7] = value
        layer.mlps[5].up_proj.weight[0] = value
    inputs = inputs_of(model, layer, batches, [torch.full_like(each, held) for each in flags])
    with pytest.raises(
        CoverageError, match=r"model\.layers\.1\.mlp\.experts expert 3 has NaN or infinite activations"
    ):
        channel_grams(layer, [1, 3, 5], inputs)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_experts_computed_together_are_rounded_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, device: str
):
    """In any order, in 16 bits; on a CPU, by the call that a GPU takes."""
    monkeypatch.setattr(grouped_experts, "_in_one_call", lambda _rows: True)
    monkeypatch.setattr(LayerInputs, "experts_together", EXPERTS)
    width = {"intermediate_size": CHANNELS, "num_local_experts": EXPERTS} if family == "gpt_oss" else {}
    model = open_stock(save_float64(tmp_path / "model", family, **width), linear=True).to(device, torch.bfloat16)
    batches, held = data(1)
    layer = find_moe_layers(model)[0]
    inputs = inputs_of(model, layer, batches, held)
    order = [*reversed(range(EXPERTS)), 0]
    found_2DII = channel_grams(layer, order, inputs)
    errors = torch.zeros(2, dtype=torch.float64)
    for position, expert in enumerate(order):
        tokens = inputs.tokens(expert)
        with ExpertFunction(layer, expert) as function:
            alone, exact = (function.activation(x_MH) for x_MH in (tokens.x_MH, tokens.x_MH.double()))
        alone_2II, exact_2II = (
            torch.stack([gram(*side) for side in tokens._replace(x_MH=a_MI).sides()]) for a_MI in (alone, exact)
        )
        errors += torch.stack(
            [(each - exact_2II).square().sum() for each in (found_2DII[:, position], alone_2II)]
        ).cpu()
    assert 0 < errors[0] <= 1.5 * errors[1]
