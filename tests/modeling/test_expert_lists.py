"""Experts that remote code has in a list are found, compute as before, and let gradients through."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.checkpoint.runs import logits, prompt
from tests.remote_code.modeling_listed_experts import DeepseekMoE
from tests.tiny import diversify, listed_model


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = listed_model().eval()
    diversify(model)
    return model


def test_nothing_changes_but_the_container(model):
    with pytest.raises(CoverageError, match="no mixture-of-experts layer in linear form"):
        find_moe_layers(model)
    before, tensors = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    linearize_expert_lists(model)
    layers = find_moe_layers(model)
    assert [layer.name for layer in layers] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert all((layer.num_experts, layer.top_k, set(layer.widths)) == (8, 2, {256}) for layer in layers)
    after = model.state_dict()
    assert tensors.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in tensors.items())
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    linearize_expert_lists(model)
    torch.testing.assert_close(logits(copy.deepcopy(model)), before, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_experts(model):
    """The model's own code runs experts without gradient unless it trains."""
    parameter = model.model.layers[1].mlp.experts[0].down_proj.weight
    model(prompt()).logits.sum().backward()
    assert parameter.grad is None
    linearize_expert_lists(model)
    model(prompt()).logits.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.any()


def test_router_may_give_weights_first(model):
    before = logits(model)
    linearize_expert_lists(model)
    for layer in find_moe_layers(model):
        layer.router.register_forward_hook(lambda _router, _args, output: (output[1], output[0]))
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


def test_a_layer_with_another_child_raises(model):
    model.model.layers[1].mlp.norm = torch.nn.LayerNorm(128)
    with pytest.raises(
        CoverageError, match=r"model.layers.1.mlp \(DeepseekMoE\) has its experts in a list beside norm"
    ):
        linearize_expert_lists(model)


def test_a_layer_with_another_output_raises(model, monkeypatch):
    own = DeepseekMoE.forward
    monkeypatch.setattr(DeepseekMoE, "forward", lambda self, hidden_states: 1.1 * own(self, hidden_states))
    with pytest.raises(CoverageError, match="its output is not the sum"):
        linearize_expert_lists(model)
