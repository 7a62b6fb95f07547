"""Removed experts are never chosen, and the router is otherwise unchanged."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from compressed_tensors.offload import OffloadCache, offload_module
from torch.overrides import _get_current_function_mode

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.moe_layers import correction_biases, find_moe_layers
from moe_coverage_plugin.modeling.router_mask import check_maskable, mask_router
from moe_coverage_plugin.modeling.slicing import remove_expert
from tests.checkpoint.runs import linear_model, logits
from tests.tiny import CONFIGS

# experts to remove of each family: group-limited routers need two kept experts in each group
REMOVED = {family: [0, 3] if family in ("mixtral", "gpt_oss") else [0, 2, 3, 5, 7] for family in CONFIGS}
REMOVED["deepseek_v3"] = [0, 2, 5, 7]


def routing(model, ids=None):
    """The experts chosen for each token and their weights, for each layer, from the model as a whole."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        layer.experts.register_forward_pre_hook(lambda _m, args, name=layer.name: seen.update({name: args[1:3]}))
        for layer in find_moe_layers(model)
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
    for layer in find_moe_layers(masked):
        for expert in REMOVED[name]:
            remove_expert(layer, expert)
        mask_router(layer)
    return masked


def test_removed_experts_are_never_chosen(family):
    name, model = family
    before = routing(model)
    assert any(int(expert) in REMOVED[name] for ids, _ in before.values() for expert in ids.flatten())
    after = routing(masked_copy(family))
    for ids, weights in after.values():
        assert not set(ids.flatten().tolist()) & set(REMOVED[name])
        assert torch.isfinite(weights).all()
        assert (weights > 0).all()


def test_kept_experts_keep_their_logits(family):
    """In the first layer, whose input does not change."""
    name, model = family
    masked = masked_copy(family)
    found = []
    for each in (model, masked):
        layer = find_moe_layers(each)[0]
        outputs = []
        handle = layer.router.register_forward_hook(lambda _m, _a, out, seen=outputs: seen.append(out))
        with torch.no_grad():
            each(torch.arange(2, 42)[None])
        handle.remove()
        found.append(outputs[0])
    experts = find_moe_layers(model)[0].num_experts
    kept = [expert for expert in range(experts) if expert not in REMOVED[name]]
    # some routers return the logits first, some their softmax over all experts, whose ratios stay
    plain, hidden = (next(t for t in out if t.is_floating_point() and t.shape[-1] == experts) for out in found)
    plain, hidden = plain[..., kept], hidden[..., kept]
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
    for layer in find_moe_layers(masked_copy(family)):
        for module, attribute in correction_biases(layer):
            flat = getattr(module, attribute).flatten()
            assert (flat[REMOVED[name]] == float("-inf")).all()
            assert torch.isfinite(flat).sum() == layer.num_experts - len(REMOVED[name])


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe"])
def test_offloaded_modules(name):
    model = linear_model(name)
    reference = logits(masked_copy((name, model)))
    offloaded = deepcopy(model)
    offload(offloaded)
    for layer in find_moe_layers(offloaded):
        for expert in REMOVED[name]:
            remove_expert(layer, expert)
        mask_router(layer)
    for ids, _ in routing(offloaded).values():
        assert not set(ids.flatten().tolist()) & set(REMOVED[name])
    torch.testing.assert_close(logits(offloaded), reference, rtol=1e-5, atol=1e-5)


def test_masked_before_it_is_offloaded():
    masked = masked_copy(("qwen3_moe", linear_model("qwen3_moe")))
    reference = logits(masked)
    offload(masked)
    torch.testing.assert_close(logits(masked), reference, rtol=1e-5, atol=1e-5)


def test_an_error_inside_the_router_leaves_no_mode_behind():
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    remove_expert(layer, 1)
    mask_router(layer)
    reference = logits(model)
    for wrong in (torch.randn(3, 5), torch.randn(2, 3, 77)):
        with pytest.raises(RuntimeError):
            layer.router(wrong)
        assert _get_current_function_mode() is None
    assert torch.equal(logits(model), reference)
    # the mask must not leak into other linear maps of the same width
    assert torch.isfinite(torch.nn.functional.linear(torch.randn(2, 128), torch.randn(8, 128))).all()


def test_an_error_in_an_earlier_hook_leaves_no_mode_behind():
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    remove_expert(layer, 1)
    mask_router(layer)

    def fail(_module, _args):
        raise ValueError("someone else's hook")

    handle = layer.router.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="someone else"):
        logits(model)
    handle.remove()
    assert _get_current_function_mode() is None
    assert torch.isfinite(logits(model)).all()


def test_a_router_that_lost_outputs_afterwards_raises():
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    remove_expert(layer, 1)
    mask_router(layer)
    router = layer.router
    router.weight = torch.nn.Parameter(router.weight[2:].detach())
    with pytest.raises(CoverageError, match=r"6 outputs but 8 experts .* before pruning channels"):
        logits(model)
    assert _get_current_function_mode() is None


def test_a_layer_without_removed_experts_is_unchanged():
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    mask_router(layer)
    assert not layer.router._forward_hooks
    assert not layer.router._forward_pre_hooks


def test_gradients_pass_through_the_mask():
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    remove_expert(layer, 1)
    mask_router(layer)
    model(torch.arange(2, 42)[None]).logits.square().mean().backward()
    gradient_EH = layer.router.weight.grad
    assert torch.isfinite(gradient_EH).all()
    assert not gradient_EH[1].any()
    assert gradient_EH[0].any()


class OwnRouter(torch.nn.Module):
    """A router as code beside a checkpoint may write it: its product by any function, its weight either way round."""

    def __init__(self, router: torch.nn.Module, product: str):
        super().__init__()
        self.weight = torch.nn.Parameter(router.weight.detach().clone())
        self.weight_HE = torch.nn.Parameter(router.weight.detach().T.contiguous())
        self.product, self.top_k = product, router.top_k

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TE = PRODUCTS[self.product](x_TH, self)
        weights_TK, ids_TK = torch.topk(logits_TE.softmax(-1), self.top_k, dim=-1)
        return logits_TE, weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK


PRODUCTS = {
    "F.linear": lambda x, router: torch.nn.functional.linear(x, router.weight),
    "@": lambda x, router: x @ router.weight.T,
    "@ with [H, E]": lambda x, router: x @ router.weight_HE,
    "matmul": lambda x, router: torch.matmul(x, router.weight_HE),
    "einsum": lambda x, router: torch.einsum("th,eh->te", x, router.weight),
    "mm": lambda x, router: x.mm(router.weight_HE),
    "addmm": lambda x, router: torch.addmm(torch.zeros(len(router.weight)), x, router.weight_HE),
    "multiply and add": lambda x, router: (x[:, None] * router.weight).sum(-1),
    "bmm": lambda x, router: x[None].bmm(router.weight_HE[None])[0],
    "inner": lambda x, router: torch.inner(x, router.weight),
    "tensordot": lambda x, router: torch.tensordot(x, router.weight_HE, 1),
    "into a buffer": lambda x, router: into_buffer(x, router.weight_HE),
    "autograd function": lambda x, router: Product.apply(x, router.weight_HE),
    "weight cast and cached": lambda x, router: torch.nn.functional.linear(x.double(), cached(router)).float(),
    "sigmoid": lambda x, router: torch.logit((x @ router.weight_HE).sigmoid()),
    "noise": lambda x, router: x @ router.weight_HE + torch.randn(len(x), len(router.weight)),
    "transposed": lambda x, router: (router.weight @ x.T).T,
    "script": lambda x, router: scripted_product(x, router.weight_HE),
    "masked, then replaced": lambda x, router: (x @ router.weight_HE).nan_to_num(neginf=1e9),
    "own bias of scores": lambda x, router: (x @ router.weight_HE).sigmoid() + torch.linspace(0, 0.1, 8),
    "shifted scores": lambda x, router: (y := x @ router.weight_HE) - y.amin(-1, keepdim=True),
}
UNMASKABLE = {
    "multiply and add": "computes its logits by none of linear, matmul, mm, addmm, .* and einsum",
    "transposed": "[0-9]+ outputs but 8 experts",
    "script": "computes its logits by none of linear",
    "masked, then replaced": "chooses removed experts although their logits are -inf",
    "own bias of scores": "chooses removed experts although their logits are -inf",
    "shifted scores": "chooses removed experts although their logits are -inf",
}


class Product(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


@torch.jit.script
def scripted_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight)


def into_buffer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    buffer = x.new_empty(len(x), weight.shape[1])
    torch.matmul(x.detach(), weight.detach(), out=buffer)
    return buffer


def cached(router) -> torch.Tensor:
    if not hasattr(router, "_cast"):
        router._cast = router.weight.detach().double()
    return router._cast


def with_own_router(product: str, remove: bool = True):
    """A model whose first MoE layer has such a router and lost two experts."""
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    layer.moe.gate = OwnRouter(layer.router, product)
    layer = find_moe_layers(model)[0]
    if not remove:
        return model, layer
    for expert in (1, 6):
        remove_expert(layer, expert)
    return model, layer


@pytest.mark.parametrize("product", [name for name in PRODUCTS if name not in UNMASKABLE])
def test_a_router_of_another_product_is_masked(product):
    model, layer = with_own_router(product)
    before = layer.router(torch.randn(200, 128))[2]
    assert torch.isin(before, torch.tensor([1, 6])).any()
    mask_router(layer)
    ids, weights = routing(model)[layer.name]
    assert not torch.isin(ids, torch.tensor([1, 6])).any()
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("product", UNMASKABLE)
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_router_that_cannot_be_masked_raises_at_once(product, offloaded):
    """Without the check the mask would do nothing, and tokens would be sent to experts that are not there."""
    model, layer = with_own_router(product)
    if offloaded:
        offload(model)
    with pytest.raises(CoverageError, match=UNMASKABLE[product]):
        mask_router(layer)
    assert not layer.router._forward_hooks
    assert not layer.router._forward_pre_hooks
    assert _get_current_function_mode() is None


def test_a_router_without_values_is_checked_when_it_runs():
    _, layer = with_own_router("multiply and add")
    layer.router.to("meta")
    mask_router(layer)
    with pytest.raises(CoverageError, match="computes its logits by none"):
        layer.router(torch.randn(3, 128, device="meta"))


def test_the_check_changes_neither_the_random_state_nor_the_mode(log):
    _, layer = with_own_router("@")
    layer.router.train()
    log.clear()
    state = torch.get_rng_state()
    mask_router(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.router.training
    assert not log


class PlainLayer(torch.nn.Module):
    """A layer that gives its router an argument that only it has, as code beside a checkpoint may do."""

    def __init__(self, moe: torch.nn.Module, known: bool):
        super().__init__()
        self.gate, self.experts, self.known = moe.gate, moe.experts, known

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.known or hidden_states.shape[1] == 100
        _, weights, ids = self.gate(hidden_states=hidden_states.flatten(0, 1), scale=1.0)
        return self.experts(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)


class ScaledRouter(OwnRouter):
    def forward(self, *, hidden_states: torch.Tensor, scale: float):
        return super().forward(hidden_states * scale)


@pytest.mark.parametrize("product", ["@", "masked, then replaced"])
@pytest.mark.parametrize("known", [True, False], ids=["run by its layer", "not run before the model"])
def test_a_router_that_cannot_be_run_alone(product, known, log):
    """Field case 2.9: it is checked inside its layer, or when the model runs first, not left unchecked."""
    model = linear_model("qwen3_moe")
    layer = find_moe_layers(model)[0]
    layer.moe.gate = ScaledRouter(layer.router, product)
    model.set_submodule(layer.name.rpartition(".")[0], PlainLayer(layer.moe, known))
    layer = find_moe_layers(model)[0]
    for expert in (1, 6):
        remove_expert(layer, expert)

    def mask_and_run():
        mask_router(layer)
        assert any("could not be run to check its mask" in message for message in log) != known
        return routing(model)[layer.name][0]

    if product == "@":
        assert not torch.isin(mask_and_run(), torch.tensor([1, 6])).any()
    else:
        with pytest.raises(CoverageError, match="chooses removed experts"):
            mask_and_run()
        assert _get_current_function_mode() is None


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_mask_is_tried_before_anything_is_removed(product):
    """Field case 2.9: for every way to compute logits, a clear error or a mask that works, and nothing changes."""
    model, layer = with_own_router(product, remove=False)
    before = logits(model) if product != "noise" else None
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if product in UNMASKABLE:
        with pytest.raises(CoverageError, match=rf"OwnRouter.*use layout='padded'|{UNMASKABLE[product]}"):
            check_maskable(layer)
    else:
        check_maskable(layer)
    assert not layer.router._forward_hooks
    assert not layer.router._forward_pre_hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert before is None or torch.equal(logits(model), before)


def test_trying_a_mask_leaves_every_family_unchanged(family, log):
    """Field case 2.9: no false alarm, and correction biases are restored."""
    name, model = family
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for layer in find_moe_layers(model):
        check_maskable(layer)
        assert not layer.router._forward_hooks
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not [message for message in log if "could not be run" in message], name


def test_a_table_of_token_ids_raises():
    _, layer = with_own_router("@")
    layer.router.tid2eid = torch.zeros(512, 2, dtype=torch.int64)
    with pytest.raises(CoverageError, match="table of token ids, so 2 removed experts cannot be masked"):
        mask_router(layer)
