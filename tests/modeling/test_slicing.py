"""Slicing channels equals masking them, for every kind of expert."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, projections
from moe_coverage_plugin.modeling.slicing import prune_expert, prune_layer, remove_expert
from tests.checkpoint.runs import linear_model, logits

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "granitemoe", "gpt_oss")
SHAPE = {"intermediate_size": 48}


def random_choice(layer, seed: int, keep_all: bool = False):
    generator = torch.Generator().manual_seed(seed)
    kept_E = []
    for expert, width in enumerate(layer.widths):
        count = width if keep_all else [width, 1, width // 2, 7][expert % 4]
        kept_E.append(torch.randperm(width, generator=generator)[:count].sort().values)
    return kept_E


@torch.no_grad()
def zero_others(layer, kept_E):
    """Set the columns of the removed channels to zero, which slicing must equal."""
    for mlp, kept_N in zip(layer.mlps, kept_E, strict=True):
        removed_I = torch.ones(mlp.down_proj.in_features, dtype=torch.bool)
        removed_I[kept_N] = False
        mlp.down_proj.weight[:, removed_I] = 0


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return linear_model(request.param)


def test_slicing_equals_masking(model):
    masked, sliced = deepcopy(model), deepcopy(model)
    for seed, (one, other) in enumerate(zip(find_moe_layers(masked), find_moe_layers(sliced), strict=True)):
        kept_E = random_choice(one, seed)
        zero_others(one, kept_E)
        prune_layer(other, kept_E)
        assert other.widths == [kept.numel() for kept in kept_E]
    assert not torch.equal(logits(masked), logits(model)), "the mask must change something"
    torch.testing.assert_close(logits(sliced), logits(masked), rtol=1e-5, atol=2e-5)


def test_padding_changes_nothing(model):
    """Case 7: gate_proj and up_proj are padded separately, with zeros that change no output."""
    ragged, padded = deepcopy(model), deepcopy(model)
    for seed, (one, other) in enumerate(zip(find_moe_layers(ragged), find_moe_layers(padded), strict=True)):
        kept_E = random_choice(one, seed)
        width = max(kept.numel() for kept in kept_E)
        prune_layer(one, kept_E)
        prune_layer(other, kept_E, padded_width=width)
        assert set(other.widths) == {width}
    torch.testing.assert_close(logits(padded), logits(ragged), rtol=1e-5, atol=2e-5)


def test_every_projection_is_sliced_by_the_same_index(model):
    """Case 16, case 31: so are the biases of gate_proj and up_proj; the bias of down_proj is unchanged."""
    pruned = deepcopy(model)
    before, after = find_moe_layers(model)[0], find_moe_layers(pruned)[0]
    kept_E = random_choice(after, 3)
    prune_layer(after, kept_E)
    for old, new, kept_N in zip(before.mlps, after.mlps, kept_E, strict=True):
        for name, linear in projections(new).items():
            reference = projections(old)[name]
            if name == "down_proj":
                assert torch.equal(linear.weight, reference.weight[:, kept_N])
                assert (linear.in_features, linear.out_features) == (len(kept_N), reference.out_features)
                if reference.bias is not None:
                    assert torch.equal(linear.bias, reference.bias), "it belongs to the output"
            else:
                assert torch.equal(linear.weight, reference.weight[kept_N])
                assert (linear.in_features, linear.out_features) == (reference.in_features, len(kept_N))
                if reference.bias is not None:
                    assert torch.equal(linear.bias, reference.bias[kept_N])
            assert linear.weight.is_contiguous()
            assert linear.weight.requires_grad == reference.weight.requires_grad


def test_one_family_has_biases():
    mlp = find_moe_layers(linear_model("gpt_oss"))[0].mlps[0]
    assert all(linear.bias is not None and bool(linear.bias.any()) for linear in projections(mlp).values())


@pytest.mark.parametrize("kept", [[3, 1, 2], [1, 1, 2]])
def test_an_index_that_does_not_ascend_raises(kept):
    """Case 31: the order of kept channels must be the same in all projections."""
    model = linear_model("qwen3_moe", moe_intermediate_size=8, num_hidden_layers=1)
    mlp = find_moe_layers(model)[0].mlps[0]
    before = mlp.down_proj.weight.clone()
    with pytest.raises(AssertionError, match="ascend"):
        prune_expert(mlp, torch.tensor(kept), 3)
    assert torch.equal(mlp.down_proj.weight, before)


def test_a_removed_expert_keeps_its_number_and_outputs_zero():
    model = linear_model("qwen3_moe", moe_intermediate_size=8, num_hidden_layers=1)
    layer = find_moe_layers(model)[0]
    others = [mlp for index, mlp in enumerate(layer.mlps) if index != 2]
    remove_expert(layer, 2)
    assert layer.widths == [8, 8, 0, 8, 8, 8, 8, 8]
    assert [mlp for index, mlp in enumerate(layer.mlps) if index != 2] == others
    assert not list(layer.mlps[2].parameters())
    x_TH = torch.randn(5, 128)
    assert not layer.mlps[2](x_TH).any()


def test_slicing_twice_composes():
    once, twice = (linear_model("qwen3_moe", moe_intermediate_size=32, num_hidden_layers=1) for _ in range(2))
    prune_layer(find_moe_layers(once)[0], [torch.tensor([2, 9, 30])] * 8)
    layer = find_moe_layers(twice)[0]
    prune_layer(layer, [torch.tensor([2, 5, 9, 30])] * 8)
    prune_layer(layer, [torch.tensor([0, 2, 3])] * 8)
    assert torch.equal(logits(once), logits(twice))
