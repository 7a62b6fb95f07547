"""Removed experts are never chosen, by vLLM's own routers."""

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from moe_coverage_plugin.serving.compat import complete_cpu_router
from moe_coverage_plugin.serving.router import mask_router

EXPERTS, TOP_K, TOKENS = 8, 2, 200
REMOVED = [0, 3, 6]
LIVING = [expert for expert in range(EXPERTS) if expert not in REMOVED]


def route(router: CPURouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return router.select_experts(hidden_states=torch.zeros(len(logits), 4), router_logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_over_living_experts(renormalize: bool, dtype: torch.dtype) -> None:
    router = CPURouter(TOP_K, EXPERTS, renormalize=renormalize)
    mask_router(router, REMOVED, EXPERTS, torch.device("cpu"))
    logits = torch.randn(TOKENS, EXPERTS).to(dtype)
    logits[:, REMOVED] += 10  # they would win
    weights, ids = route(router, logits)
    expected, positions = logits[:, LIVING].softmax(-1, dtype=torch.float32).topk(TOP_K)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert not torch.isin(ids, torch.tensor(REMOVED)).any()
    if dtype == torch.float32:  # ties are common in bfloat16
        assert torch.equal(ids.sort().values, torch.tensor(LIVING, dtype=ids.dtype)[positions].sort().values)
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
    scores = logits[:, LIVING].sigmoid()
    positions = (scores + bias[LIVING]).topk(TOP_K).indices
    expected = scores.gather(1, positions)
    assert torch.equal(ids.sort().values.long(), torch.tensor(LIVING)[positions].sort().values)
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
    """By itself it passes over the bias of softmax scores without a word, and stops at sigmoid scores."""
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
