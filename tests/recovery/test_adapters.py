"""Adapters do not change outputs initially, compute the same as peft, and are merged into plain linear layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from moe_coverage_plugin import load
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer
from moe_coverage_plugin.recovery import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import Adapters, attach, router_module
from moe_coverage_plugin.recovery.experts import can_be_grouped, grouped_experts
from tests.checkpoint.runs import aligned, linear_model, logits, prompt

# a rank that is not a multiple of eight
OPTIONS = RecoveryOptions(expert_rank=5, router_rank=3)


@torch.no_grad()
def disturb(adapters: Adapters) -> None:
    """Set adapters to random values, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapters.parameters.items():
        scale = 0.1 * float(parameter.abs().mean()) if name.endswith(".m") else 0.05
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def gradients(model: PreTrainedModel, adapters: Adapters) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=prompt(), labels=prompt()).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in adapters.parameters.items()}


@pytest.fixture
def model(pruned):
    return aligned(load(pruned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_adapters_do_not_change_outputs(pruned, dtype):
    model = aligned(load(pruned, dtype=dtype))
    before, weights = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = attach(model, OPTIONS)
    assert {parameter.dtype for parameter in adapters.parameters.values()} == {torch.float32}
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for parameter in adapters.parameters.values()}
    with grouped_experts(adapters.adapted):
        # the order of sums over experts is different
        torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.06)
    adapters.merge()
    after = model.state_dict()
    assert after.keys() == weights.keys()
    for name, tensor in weights.items():
        tolerance = 0 if "experts" not in name else 1e-6 if dtype == torch.float32 else 0
        torch.testing.assert_close(after[name], tensor, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_grouped_adapters_compute_what_peft_does(family):
    """Widths are unequal, experts are removed and the rank is padded; experts with biases use the toolkit's loop."""
    model = linear_model(family)
    for layer in find_moe_layers(model):
        kept = [torch.arange(layer.widths[e] - 28 * e) for e in range(layer.num_experts)]
        prune_layer(layer, [kept_N if e != 1 else kept_N[:0] for e, kept_N in enumerate(kept)])
        mask_router(layer)
    adapters = attach(aligned(model), OPTIONS)
    assert [can_be_grouped(layer) for layer in adapters.layers] == [family != "gpt_oss"] * len(adapters.layers)
    disturb(adapters)
    expected, slopes = logits(model), gradients(model, adapters)
    with grouped_experts(adapters.adapted):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients(model, adapters).items():
            torch.testing.assert_close(gradient, slopes[name], rtol=1e-3, atol=1e-5, msg=name)
    # peft's layers still work with weights that are views of the padded storage
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_merging_does_not_change_outputs(model):
    widths = [layer.widths for layer in find_moe_layers(model)]
    before = logits(model)
    adapters = attach(model, OPTIONS)
    disturb(adapters)
    with grouped_experts(adapters.adapted):
        expected = logits(model)
    assert not torch.allclose(expected, before, atol=1e-2)
    adapters.merge()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert [layer.widths for layer in find_moe_layers(model)] == widths
    for layer in find_moe_layers(model):
        assert all(type(linear) is Linear and linear.weight.is_contiguous() for linear in expert_linears(layer))
        assert not hasattr(layer.experts, "peft_config")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_removed_experts_are_never_picked(model):
    adapters = attach(model, OPTIONS)
    removed = [(layer, [e for e, width in enumerate(layer.widths) if not width]) for layer in adapters.layers]
    assert any(experts for _, experts in removed)
    with torch.no_grad():
        # removed experts get the largest router logits
        for layer, experts in removed:
            router_module(layer).parametrizations.weight[0].b_ER[experts] = 100.0
    picked: dict[str, Tensor] = {}
    for layer, _ in removed:
        layer.experts.register_forward_pre_hook(lambda _module, args, name=layer.name: picked.update({name: args[1]}))
    with grouped_experts(adapters.adapted):
        logits(model)
        assert not any(set(experts) & set(picked[layer.name].unique().tolist()) for layer, experts in removed)
    adapters.merge()
    logits(model)
    assert not any(set(experts) & set(picked[layer.name].unique().tolist()) for layer, experts in removed)


def test_zero_channels_remain_zero(model):
    """The magnitude and the norm of such a channel are zero, and 0 / 0 would give NaN in the entire model."""
    linear = expert_linears(find_moe_layers(model)[0])[0]
    with torch.no_grad():
        linear.weight[3] = 0
    adapters = attach(model, OPTIONS)
    with grouped_experts(adapters.adapted):
        slopes = gradients(model, adapters)
    assert all(torch.isfinite(gradient).all() for gradient in slopes.values())
    adapters.merge()
    linear = expert_linears(find_moe_layers(model)[0])[0]
    assert not linear.weight[3].any()
    assert torch.isfinite(linear.weight).all()


def test_weights_share_the_padded_storage(model):
    """The weights are views of the padded storage, so they are not stored twice."""
    adapters = attach(copy.deepcopy(model), OPTIONS)
    with grouped_experts(adapters.adapted):
        for layer in adapters.adapted:
            storages = {
                linear.get_base_layer().weight.untyped_storage().data_ptr() for linear in expert_linears(layer)
            }
            assert len(storages) == 3


def test_experts_without_tokens_have_zero_gradients(model):
    """Kernels may leave the gradient of such an expert uninitialized."""
    adapters = attach(model, OPTIONS)
    disturb(adapters)
    seen: dict[str, set[int]] = {}
    for layer in adapters.layers:
        layer.experts.register_forward_pre_hook(
            lambda _module, args, name=layer.name: seen.update({name: set(args[1].unique().tolist())})
        )
    with grouped_experts(adapters.adapted):
        model(input_ids=prompt()[:1, :2], labels=prompt()[:1, :2]).loss.backward()
    unseen = [
        parameter.grad
        for name, parameter in adapters.experts.items()
        for layer, experts in seen.items()
        if name.startswith(f"{layer}.") and int(name.removeprefix(f"{layer}.").split(".")[0]) not in experts
    ]
    assert unseen
    assert not any(gradient is not None and gradient.any() for gradient in unseen)
