"""Removed experts are never selected by vLLM's own routers, and a router that ignores the mask is found.

Tokens of all ranks are routed without the mask of padded tokens that one rank has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.compat import complete_cpu_router
from moe_coverage_plugin.serving.router import check_mask, mask_router, route_gathered_tokens

EXPERTS, TOP_K, TOKENS = 8, 2, 200
REMOVED = [0, 3, 6]
KEPT = [expert for expert in range(EXPERTS) if expert not in REMOVED]


def check(router: Any, dtype: torch.dtype = torch.float32) -> None:
    check_mask(router, REMOVED, EXPERTS, 4, torch.device("cpu"), dtype, dtype)


def route(router: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return router.select_experts(hidden_states=torch.zeros(len(logits), 4), router_logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_over_kept_experts(renormalize: bool, dtype: torch.dtype) -> None:
    router = CPURouter(TOP_K, EXPERTS, renormalize=renormalize)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    logits = torch.randn(TOKENS, EXPERTS).to(dtype)
    logits[:, REMOVED] += 10  # without a mask they would be selected
    weights, ids = route(router, logits)
    expected, positions = logits[:, KEPT].softmax(-1, dtype=torch.float32).topk(TOP_K)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert not torch.isin(ids, torch.tensor(REMOVED)).any()
    if dtype == torch.float32:  # ties are common in bfloat16
        assert torch.equal(ids.sort().values, torch.tensor(KEPT, dtype=ids.dtype)[positions].sort().values)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weights.sort().values, expected.sort().values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [1, 2])
def test_sigmoid_with_correction_bias(groups: int) -> None:
    bias = torch.randn(EXPERTS)
    bias[REMOVED] = -torch.inf  # as checkpoints store it
    router = CPURouter(
        TOP_K,
        EXPERTS,
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=groups,
        scoring_func="sigmoid",
        e_score_correction_bias=bias,
    )
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    logits = torch.randn(TOKENS, EXPERTS)
    logits[:, REMOVED] += 10
    weights, ids = route(router, logits)
    scores = logits[:, KEPT].sigmoid()
    positions = (scores + bias[KEPT]).topk(TOP_K).indices
    expected = scores.gather(1, positions)
    assert torch.equal(ids.sort().values.long(), torch.tensor(KEPT)[positions].sort().values)
    torch.testing.assert_close(weights.sort().values, (expected / expected.sum(-1, keepdim=True)).sort().values)


def test_logits_of_the_caller_are_left_alone() -> None:
    router = CPURouter(TOP_K, EXPERTS)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    logits = torch.randn(TOKENS, EXPERTS)
    before = logits.clone()
    route(router, logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("scoring_func", "has_bias"), [("softmax", True), ("sigmoid", True), ("sigmoid", False)])
def test_cpu_router_without_groups_reads_bias_and_scores(scoring_func: str, has_bias: bool) -> None:
    """By itself it ignores the bias of softmax scores without an error, and stops at sigmoid scores."""
    bias = torch.randn(EXPERTS) if has_bias else None
    router = CPURouter(TOP_K, EXPERTS, scoring_func=scoring_func, e_score_correction_bias=bias)
    complete_cpu_router(router)
    logits = torch.randn(TOKENS, EXPERTS)
    weights, ids = route(router, logits)
    scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
    positions = (scores if bias is None else scores + bias).topk(TOP_K).indices
    expected = scores.gather(1, positions)
    assert torch.equal(ids.sort().values.long(), positions.sort().values)
    torch.testing.assert_close(weights.sort().values, (expected / expected.sum(-1, keepdim=True)).sort().values)


def test_cpu_router_that_needs_no_help_is_left_alone() -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    router = CPURouter(TOP_K, EXPERTS, renormalize=False)
    before = route(router, logits)
    complete_cpu_router(router)
    assert not router.use_grouped_topk
    assert all(torch.equal(*pair) for pair in zip(before, route(router, logits), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_a_masked_router_passes_the_check(scoring_func: str, dtype: torch.dtype) -> None:
    bias = torch.zeros(EXPERTS).index_fill(0, torch.tensor(REMOVED), -torch.inf) if scoring_func == "sigmoid" else None
    router = CPURouter(TOP_K, EXPERTS, scoring_func=scoring_func, e_score_correction_bias=bias)
    complete_cpu_router(router)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    state = torch.get_rng_state()
    check(router, dtype)
    assert torch.equal(torch.get_rng_state(), state)


class HiddenRouter(CPURouter):
    """Computes logits of its own from the hidden states, as a fused gate does."""

    def _compute_routing(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any):
        return super()._compute_routing(hidden_states, hidden_states.repeat(1, 2), *args, **kwargs)


class PropertyRouter(CPURouter):
    """Looks its method up in the class and ignores one that is put on an object."""

    @property
    def select_experts(self) -> Any:
        return super().select_experts

    @select_experts.setter
    def select_experts(self, _: Any) -> None:
        pass


class CompiledRouter(CPURouter):
    """Has no dictionary of attributes that a method could be put into, like a class of a compiled extension."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "select_experts":
            raise AttributeError(f"'CompiledRouter' object attribute {name!r} is read-only")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [HiddenRouter, PropertyRouter])
def test_a_router_that_ignores_the_mask_is_found(kind: type[CPURouter]) -> None:
    router = kind(TOP_K, EXPERTS)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    with pytest.raises(
        CoverageError, match=rf"{kind.__name__} of this vLLM selects \d of 3 removed experts, first \d"
    ):
        check(router)


def test_correction_bias_that_prefers_removed_experts_is_found() -> None:
    """The score of a masked logit is 0 after sigmoid, so the checkpoint's bias must be ``-inf``."""
    bias = torch.zeros(EXPERTS).index_fill(0, torch.tensor(REMOVED), 2.0)
    router = CPURouter(TOP_K, EXPERTS, scoring_func="sigmoid", e_score_correction_bias=bias)
    complete_cpu_router(router)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    with pytest.raises(CoverageError, match="selects 3 of 3 removed experts"):
        check(router)


def test_the_check_compiles_nothing() -> None:
    """Some of vLLM's routers are compiled, and the engine compiles all of them as a part of the model."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    router = CPURouter(TOP_K, EXPERTS)
    router._compute_routing = torch.compile(router._compute_routing, backend=backend)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    check(router)
    assert compiled == []
    _, ids = torch.compile(lambda logits: route(router, logits), backend=backend)(torch.randn(TOKENS, EXPERTS))
    assert compiled
    assert not torch.isin(ids, torch.tensor(REMOVED)).any()


def test_a_router_whose_method_cannot_be_replaced() -> None:
    with pytest.raises(CoverageError, match=r"CompiledRouter of this vLLM does not let its method .* layout='padded'"):
        mask_router(CompiledRouter(TOP_K, EXPERTS), REMOVED, EXPERTS, torch.device("cpu"))


def context(is_padding: list[bool]) -> ForwardContext:
    """vLLM's description of a pass on one rank."""
    return ForwardContext({}, {}, {}, is_padding=torch.tensor(is_padding))


def grouped_router(**options: Any) -> GroupedTopKRouter:
    return GroupedTopKRouter(TOP_K, EXPERTS, num_expert_group=2, topk_group=1, skip_padding=True, **options)


@pytest.mark.parametrize("is_padding", [[False, False, True], [True]])
def test_gathered_tokens_are_routed_without_the_mask_of_one_rank(is_padding: list[bool]) -> None:
    """The mask of an idle rank has one token, which would be broadcast to the tokens of all ranks."""
    router = grouped_router()
    logits = torch.randn(8, EXPERTS)
    with torch.compiler.set_stance("force_eager"):
        expected = route(router, logits)
        route_gathered_tokens(router)
        one_rank = context(is_padding)
        with override_forward_context(one_rank):
            found = route(router, logits)
            assert get_forward_context().is_padding is one_rank.is_padding is not None
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_padding_of_tokens_that_are_not_gathered_gets_no_expert() -> None:
    router = grouped_router()
    route_gathered_tokens(router)
    with torch.compiler.set_stance("force_eager"), override_forward_context(context([False, True, True])):
        _, ids = route(router, torch.randn(3, EXPERTS))
    assert (ids == -1).all(-1).tolist() == [False, True, True]


def test_the_mask_returns_after_an_error() -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    router = SimpleNamespace(select_experts=stop)
    route_gathered_tokens(router)
    with override_forward_context(context([True])):
        with pytest.raises(RuntimeError, match="out of memory"):
            route(router, torch.randn(8, EXPERTS))
        assert get_forward_context().is_padding is not None


@pytest.mark.parametrize("tokens", [3, 8])
def test_the_operator_of_softmax_scores_gets_no_mask_that_is_too_short(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """It stops at one; it has no version for CPUs, so what it is called with is recorded."""
    masks: list[torch.Tensor | None] = []

    def topk_softmax(*_: Any, is_padding: torch.Tensor | None) -> None:
        masks.append(is_padding)

    monkeypatch.setattr("vllm._custom_ops.topk_softmax", topk_softmax)
    router = FusedTopKRouter(TOP_K, EXPERTS)
    route_gathered_tokens(router)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    with override_forward_context(context([False, False, True])):
        route(router, torch.randn(tokens, EXPERTS))
    [mask] = masks
    assert (mask is None) == (tokens > 3)
    assert mask is None or mask.tolist() == [False, False, True]


@pytest.mark.parametrize("kind", [PropertyRouter, CompiledRouter])
def test_a_router_that_would_mask_tokens_of_other_ranks(kind: type[CPURouter]) -> None:
    with pytest.raises(
        CoverageError, match=rf"{kind.__name__} of this vLLM .* are masked wrongly: serve with --tensor"
    ):
        route_gathered_tokens(kind(TOP_K, EXPERTS))
