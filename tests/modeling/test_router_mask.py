"""Removed experts are never chosen, and the router is otherwise itself."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from compressed_tensors.offload import OffloadCache, offload_module
from torch.overrides import _get_current_function_mode

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.moe_layers import correction_biases, find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import remove_expert
from tests.checkpoint.runs import linear_model, logits
from tests.tiny import CONFIGS

# per family: experts to remove. Group-limited routers need two live experts in each group.
DEAD = {family: [0, 3] if family in ("mixtral", "gpt_oss") else [0, 2, 3, 5, 7] for family in CONFIGS}
DEAD["deepseek_v3"] = [0, 2, 5, 7]


def routing(model, ids=None):
    """The experts chosen for each token and their weights, for each layer, from the model as a whole."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        block.experts.register_forward_pre_hook(lambda _m, args, name=block.name: seen.update({name: args[1:3]}))
        for block in find_moe_layers(model)
    ]
    with torch.no_grad():
        model(torch.arange(2, 402).reshape(4, 100) if ids is None else ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.fixture(scope="module", params=CONFIGS)
def family(request):
    return request.param, linear_model(request.param)


def offload(model):
    for module in model.modules():
        if not isinstance(module._parameters, OffloadCache):  # linear experts are by the toolkit
            offload_module(module, "cpu", "cpu")


def masked_copy(family):
    name, model = family
    masked = deepcopy(model)
    for block in find_moe_layers(masked):
        for expert in DEAD[name]:
            remove_expert(block, expert)
        mask_router(block)
    return masked


def test_dead_experts_are_never_chosen(family):
    name, model = family
    before = routing(model)
    assert any(int(expert) in DEAD[name] for ids, _ in before.values() for expert in ids.flatten())
    after = routing(masked_copy(family))
    for ids, weights in after.values():
        assert not set(ids.flatten().tolist()) & set(DEAD[name])
        assert torch.isfinite(weights).all()
        assert (weights > 0).all()


def test_live_experts_keep_their_logits(family):
    """In the first layer, whose input does not change."""
    name, model = family
    masked = masked_copy(family)
    found = []
    for each in (model, masked):
        block = find_moe_layers(each)[0]
        outputs = []
        handle = block.router.register_forward_hook(lambda _m, _a, out, kept=outputs: kept.append(out))
        with torch.no_grad():
            each(torch.arange(2, 42)[None])
        handle.remove()
        found.append(outputs[0])
    experts = find_moe_layers(model)[0].num_experts
    live = [expert for expert in range(experts) if expert not in DEAD[name]]
    # some routers return the logits first, some their softmax over all experts, whose ratios stay
    plain, hidden = (next(t for t in out if t.is_floating_point() and t.shape[-1] == experts) for out in found)
    plain, hidden = plain[..., live], hidden[..., live]
    if not torch.equal(plain, hidden):
        assert (plain >= 0).all()
        torch.testing.assert_close(hidden / hidden.sum(-1, keepdim=True), plain / plain.sum(-1, keepdim=True))


def test_masked_logits_are_finite_and_equal_in_a_copy(family):
    masked = masked_copy(family)
    reference = logits(masked)
    assert torch.isfinite(reference).all()
    assert torch.equal(logits(deepcopy(masked)), reference)
    assert _get_current_function_mode() is None


def test_correction_biases_are_masked_in_the_weights(family):
    name, _ = family
    for block in find_moe_layers(masked_copy(family)):
        for module, attribute in correction_biases(block):
            flat = getattr(module, attribute).flatten()
            assert (flat[DEAD[name]] == float("-inf")).all()
            assert torch.isfinite(flat).sum() == block.num_experts - len(DEAD[name])


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe"])
def test_offloaded_modules(name):
    model = linear_model(name)
    reference = logits(masked_copy((name, model)))
    offloaded = deepcopy(model)
    offload(offloaded)
    for block in find_moe_layers(offloaded):
        for expert in DEAD[name]:
            remove_expert(block, expert)
        mask_router(block)
    for ids, _ in routing(offloaded).values():
        assert not set(ids.flatten().tolist()) & set(DEAD[name])
    torch.testing.assert_close(logits(offloaded), reference, rtol=1e-5, atol=1e-5)


def test_masked_before_it_is_offloaded():
    masked = masked_copy(("qwen3_moe", linear_model("qwen3_moe")))
    reference = logits(masked)
    offload(masked)
    torch.testing.assert_close(logits(masked), reference, rtol=1e-5, atol=1e-5)


def test_an_error_inside_the_router_leaves_no_mode_behind():
    model = linear_model("qwen3_moe")
    block = find_moe_layers(model)[0]
    remove_expert(block, 1)
    mask_router(block)
    reference = logits(model)
    for wrong in (torch.randn(3, 5), torch.randn(2, 3, 77)):
        with pytest.raises(RuntimeError):
            block.router(wrong)
        assert _get_current_function_mode() is None
    assert torch.equal(logits(model), reference)
    # the mask must not leak into other linear maps of the same width
    assert torch.isfinite(torch.nn.functional.linear(torch.randn(2, 128), torch.randn(8, 128))).all()


def test_an_error_in_an_earlier_hook_leaves_no_mode_behind():
    model = linear_model("qwen3_moe")
    block = find_moe_layers(model)[0]
    remove_expert(block, 1)
    mask_router(block)

    def fail(_module, _args):
        raise ValueError("someone else's hook")

    handle = block.router.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="someone else"):
        logits(model)
    handle.remove()
    assert _get_current_function_mode() is None
    assert torch.isfinite(logits(model)).all()


def test_a_router_shrunk_afterwards_is_refused():
    model = linear_model("qwen3_moe")
    block = find_moe_layers(model)[0]
    remove_expert(block, 1)
    mask_router(block)
    router = block.router
    router.weight = torch.nn.Parameter(router.weight[2:].detach())
    with pytest.raises(CoverageError, match=r"6 outputs but 8 experts .* before pruning channels"):
        logits(model)
    assert _get_current_function_mode() is None


def test_a_block_that_lost_none_is_left_alone():
    model = linear_model("qwen3_moe")
    block = find_moe_layers(model)[0]
    mask_router(block)
    assert not block.router._forward_hooks
    assert not block.router._forward_pre_hooks


def test_gradients_pass_through_the_mask():
    model = linear_model("qwen3_moe")
    block = find_moe_layers(model)[0]
    remove_expert(block, 1)
    mask_router(block)
    model(torch.arange(2, 42)[None]).logits.square().mean().backward()
    gradient_EH = block.router.weight.grad
    assert torch.isfinite(gradient_EH).all()
    assert not gradient_EH[1].any()
    assert gradient_EH[0].any()
