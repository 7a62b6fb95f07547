"""A budget that is accepted can be carried out whatever the scores are, and what an error names is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.alignment import align, narrowest_width
from moe_coverage_plugin.core.allocation import channel_budget
from moe_coverage_plugin.core.feasibility import check_budget
from moe_coverage_plugin.core.kept_experts import RouterNeeds, keep_enough, raise_to_minimum
from moe_coverage_plugin.core.layouts import stored_widths
from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import AlignmentOptions, CoverageOptions

L, E, I = 3, 8, 16  # noqa: E741 - the axis letters

coverages = st.fixed_dictionaries(
    {
        "sparsity": st.floats(0, 0.999),
        "intra_layer": st.sampled_from(["uniform", "loss", "router_weight", "usage", "topk_channel", "coverage"]),
    }
) | st.fixed_dictionaries(
    {
        "sparsity": st.floats(0, 0.999),
        "scope": st.just("layers"),
        "inter_layer": st.sampled_from(["uniform", "u_shaped", "loss", "coverage"]),
        "intra_layer": st.sampled_from(["uniform", "usage", "topk_channel", "coverage"]),
    }
)
alignments = (
    st.none()
    | st.fixed_dictionaries({"block_size": st.sampled_from([1, 2, 4, 8, 16])})
    | st.sampled_from(
        [
            {"strategy": "hamilton", "block_size": block, "min_width": width, "rule": rule}
            for block, width in [(1, 0), (1, 5), (2, 2), (4, 0), (4, 3), (4, 8), (8, 8), (8, 16), (16, 16)]
            for rule in ("l-r-c", "l-r-s")
        ]
    )
)
needs = st.lists(st.sampled_from([(1, 1), (1, 2), (1, 8), (2, 2), (2, 4), (4, 2)]), min_size=L, max_size=L)


def scores_of(seed: int, routers: list[tuple[int, int]]) -> AttributionScores:
    """Scores that often belong to few experts, or to few layers, or are equal or zero."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator) ** (1 + seed % 30)

    scale_L11 = rand(L, 1, 1) if seed % 2 else torch.ones(L, 1, 1)
    channels_LEI = rand(L, E, I) * scale_L11 * (rand(L, E, 1) > 0.3 * (seed % 4))
    return AttributionScores(
        names=[f"model.layers.{layer}.mlp.experts" for layer in range(L)],
        top_k=[2] * L,
        channel_metric="fisher",
        channels_LEI=channels_LEI.round(decimals=1) if seed % 5 == 0 else channels_LEI,
        first_order_LE=rand(L, E),
        second_order_LE=rand(L, E),
        tokens_LE=(50 * rand(L, E)).long(),
        routing_weight_sum_LE=rand(L, E),
        layer_loss_L=rand(L),
        routers=[RouterNeeds(*pair) for pair in routers],
    )


def planned(scores: AttributionScores, coverage: CoverageOptions, alignment: AlignmentOptions | None):
    plan = plan_widths(scores, coverage)
    return plan, align(plan.widths_LE, scores, alignment, coverage.scope)


def check_plan(scores: AttributionScores, coverage: CoverageOptions, alignment: AlignmentOptions | None) -> None:
    """Every group of every router keeps what it needs, in legal widths, within the budget."""
    plan, aligned = planned(scores, coverage, alignment)
    narrowest = narrowest_width(alignment)
    widths_LE = aligned.widths_LE
    assert int(widths_LE.sum()) + aligned.unspent == int(plan.widths_LE.sum())
    assert aligned.unspent >= 0
    assert bool(((widths_LE == 0) | (widths_LE >= narrowest)).all())
    assert bool((widths_LE % (alignment.block_size if alignment else 1) == 0).all())
    assert bool(((widths_LE >= 0) & (widths_LE <= I)).all())
    for widths_E, router in zip(widths_LE, scores.router_needs, strict=True):
        assert bool(((widths_E > 0).unflatten(0, (router.groups, -1)).sum(-1) >= router.needed).all())


@given(st.integers(0, 10_000), coverages, alignments, needs, st.sampled_from(["ragged", "padded", "uniform"]))
def test_what_is_accepted_can_be_planned(
    seed: int, coverage: dict, alignment: dict | None, routers: list, layout: Any
):
    """Field case 2.10: no plan stops after calibration, and what an error names passes, and differs."""
    options, aligned = CoverageOptions(**coverage), AlignmentOptions(**alignment) if alignment else None
    scores = scores_of(seed, routers)
    try:
        check_budget(options, aligned, layout, scores.router_needs, E, I)
    except CoverageError as error:
        named = float(re.findall(r"for instance to ([\d.]+)", str(error))[0])
        assert named < options.sparsity
        options = CoverageOptions(**coverage | {"sparsity": named})
        check_budget(options, aligned, layout, scores.router_needs, E, I)
    check_plan(scores, options, aligned)
    budget = channel_budget(L * E * I, options.sparsity)
    block_size = aligned.block_size if aligned else 1
    widths_LE = stored_widths(layout, planned(scores, options, aligned)[1].widths_LE, budget, block_size)
    assert layout == "ragged" or bool((widths_LE > 0).all())


@given(st.integers(0, 10_000), coverages, alignments)
def test_plans_that_suffice_are_not_changed(seed: int, coverage: dict, alignment: dict | None):
    """Only layers whose routers would have too few experts are touched."""
    options, aligned = CoverageOptions(**coverage), AlignmentOptions(**alignment) if alignment else None
    one = scores_of(seed, [(1, 1)] * L)
    try:
        check_budget(options, aligned, "ragged", one.router_needs, E, I)
    except CoverageError:
        return
    before, again = planned(one, options, aligned)[1], scores_of(seed, [(1, 2)] * L)
    if bool(((before.widths_LE > 0).sum(-1) >= 2).all()) and before.kept_for_routers + before.raised_layers == 0:
        try:
            check_budget(options, aligned, "ragged", again.router_needs, E, I)
        except CoverageError:
            return
        after = planned(again, options, aligned)[1]
        if after.raised_layers == 0:
            assert torch.equal(after.widths_LE, before.widths_LE)


@pytest.mark.parametrize(
    ("alignment", "words"),
    [
        ({"block_size": 3}, "block size 3 does not divide the 16 channels"),
        ({"strategy": "hamilton", "block_size": 16, "min_width": 32}, "min_width=32 is above the expert width 16"),
        ({"strategy": "hamilton", "block_size": 8, "min_width": 8}, "sparsity=0.9 leaves 38 of 384 .* at least 48"),
        ({"block_size": 8}, "sparsity=0.9 leaves 38 of 384 .* at least 48: lower it, for instance to 0.5"),
    ],
)
def test_errors_name_value_limit_and_remedy(alignment: dict, words: str):
    with pytest.raises(CoverageError, match=words):
        check_budget(
            CoverageOptions(sparsity=0.9), AlignmentOptions(**alignment), "ragged", [RouterNeeds(1, 2)] * L, E, I
        )


def test_kept_experts_have_the_highest_scores_and_others_pay_the_least():
    scores_1EI = torch.tensor([[[9.0, 9, 9, 9], [1, 1, 1, 1], [2, 2, 0, 0], [5, 5, 4, 1]]])
    widths = keep_enough(torch.tensor([[4, 0, 0, 4]]), scores_1EI, torch.tensor([8]), [RouterNeeds(1, 3)], 2, 2)
    assert widths.tolist() == [[4, 0, 2, 2]]
    widths = keep_enough(torch.tensor([[4, 2, 0, 0]]), scores_1EI, torch.tensor([6]), [RouterNeeds(2, 1)], 2, 2)
    assert widths.tolist() == [[4, 0, 0, 2]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=6))
def test_budgets_are_raised_at_the_cost_of_others(pairs: list[tuple[int, int]]):
    budgets_L, minima_L = torch.tensor(pairs).T
    if int(minima_L.sum()) > int(budgets_L.sum()):
        return
    raised_L = raise_to_minimum(budgets_L, minima_L)
    assert int(raised_L.sum()) == int(budgets_L.sum())
    assert bool((raised_L >= minima_L).all())
    if bool((budgets_L >= minima_L).all()):
        assert torch.equal(raised_L, budgets_L)
