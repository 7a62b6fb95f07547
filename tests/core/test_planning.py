"""Plans with a global budget, and the importance that a plan uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.coverage import solve_coverage
from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import CoverageOptions

L, E, I = 3, 4, 6  # noqa: E741 - the axis letters


def coverage(sparsity: float, **fields: Any) -> CoverageOptions:
    """Options that allocate by coverage inside layers."""
    return CoverageOptions(sparsity=sparsity, intra_layer="coverage", **fields)


def scores_of(seed: int, **fields) -> AttributionScores:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    return AttributionScores(
        names=[f"model.layers.{layer}.mlp.experts" for layer in range(L)],
        top_k=[2] * L,
        channel_metric="fisher",
        channels_LEI=rand(L, E, I) ** 4,
        first_order_LE=rand(L, E),
        second_order_LE=rand(L, E),
        tokens_LE=torch.randint(0, 50, (L, E), generator=generator),
        routing_weight_sum_LE=rand(L, E),
        **fields,
    )


@given(st.integers(0, 1000), st.floats(0, 0.99))
def test_global_top_channels_keep_the_best_channels_of_the_model(seed: int, sparsity: float):
    scores = scores_of(seed)
    plan = plan_widths(scores, CoverageOptions(sparsity=sparsity, scope="global", intra_layer="topk_channel"))
    budget = int(plan.widths_LE.sum())
    best = scores.channels_LEI.flatten().sort(descending=True).values[:budget]
    kept = scores.channels_LEI.sort(-1, descending=True).values
    inside = torch.arange(I) < plan.widths_LE[..., None]
    assert torch.equal(kept[inside].sort(descending=True).values, best)


@given(st.integers(0, 1000), st.floats(0, 0.99))
def test_global_coverage_is_coverage_over_all_experts(seed: int, sparsity: float):
    scores = scores_of(seed)
    plan = plan_widths(scores, coverage(sparsity, scope="global"), "second_order")
    budget = int(plan.widths_LE.sum())
    flat_D = solve_coverage(scores.channels_LEI.flatten(0, 1), scores.second_order_LE.sqrt().flatten(), budget)
    assert torch.equal(plan.widths_LE.flatten(), flat_D)


def test_global_scope_does_not_need_the_loss_of_layers():
    options = coverage(0.5, scope="global")
    assert not options.uses_layer_loss
    assert int(plan_widths(scores_of(0), options).widths_LE.sum()) == L * E * I // 2
    assert coverage(0.5, scope="layers").uses_layer_loss


@pytest.mark.parametrize("importance", ["first_order", "second_order", "nll_signed", "nll_absolute", "nll_squared"])
def test_prior_is_the_given_expert_importance(importance: str):
    field = f"{importance}_LE"
    measured = {field: torch.rand(L, E, dtype=torch.float64)}
    options = coverage(0.5, scope="global")
    plan = plan_widths(replace(scores_of(0), **measured), options, importance)
    assert torch.equal(plan.expert_prior_LE, measured[field].sqrt())


def test_negative_importance_is_treated_as_zero():
    signed_LE = torch.linspace(-1, 1, L * E, dtype=torch.float64).reshape(L, E)
    options = coverage(0.75, scope="global")
    plan = plan_widths(scores_of(0, nll_signed_LE=signed_LE), options, "nll_signed")
    assert not plan.widths_LE[signed_LE < 0].any()


@pytest.mark.parametrize(
    ("layer_prior", "importance", "message"),
    [
        ("uniform", "nll_squared", "do not contain nll_squared"),
        ("loss", "first_order", "do not contain the importance of layers"),
    ],
)
def test_importance_that_was_not_measured_is_an_error(layer_prior: str, importance: Any, message: str):
    with pytest.raises(CoverageError, match=message):
        plan_widths(scores_of(0), coverage(0.5, scope="layers", layer_prior=layer_prior), importance)


def test_errors_name_the_layer_with_global_scope():
    scores = scores_of(0)
    scores.channels_LEI[2, 1, 3] = float("nan")
    with pytest.raises(CoverageError, match="layer 2 expert 1"):
        plan_widths(scores, CoverageOptions(sparsity=0.5, scope="global", intra_layer="topk_channel"))
