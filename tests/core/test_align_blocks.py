"""Alignment by the best blocks, compared with an exhaustive search over all allocations of small cases."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_coverage_plugin.core.alignment import align_blocks
from moe_coverage_plugin.manifest import CoverageError

# L layers of E experts with I channels in blocks of A, few enough to list all allocations
L, E, I, A = 2, 3, 6, 2  # noqa: E741 - the axis letters

# few different values, so that equal scores are common
values = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.5])
scores = st.lists(values, min_size=L * E * I, max_size=L * E * I).map(
    lambda flat: torch.tensor(flat, dtype=torch.float64).reshape(L, E, I)
)
widths = st.lists(st.integers(0, I), min_size=L * E, max_size=L * E).map(lambda flat: torch.tensor(flat).reshape(L, E))


def kept_score(scores_LEI: Tensor, widths_LE: Tensor) -> Tensor:
    """Score of the kept channels of each layer, ``[L]``."""
    kept = torch.arange(I) < widths_LE[..., None]
    return (scores_LEI.sort(-1, descending=True).values * kept).sum((-1, -2))


def best_by_trying(scores_EI: Tensor, budget: int, allowed) -> float:
    """Largest kept score over all allowed multiples of a block within the budget; -1 if no widths are allowed."""
    ranked_EI = scores_EI.sort(-1, descending=True).values
    best = -1.0
    for candidate in product(range(0, I + 1, A), repeat=len(scores_EI)):
        if sum(candidate) <= budget and allowed(candidate):
            best = max(best, sum(float(row[:width].sum()) for row, width in zip(ranked_EI, candidate, strict=True)))
    return best


@settings(deadline=None)
@given(scores, widths, st.integers(1, 2))
def test_best_over_each_layer(scores_LEI: Tensor, widths_LE: Tensor, top_k: int):
    def enough(candidate) -> bool:
        return sum(width > 0 for width in candidate) >= top_k

    best_L = [best_by_trying(scores_LEI[layer], int(widths_LE[layer].sum()), enough) for layer in range(L)]
    if min(best_L) < 0:
        with pytest.raises(CoverageError, match="too few"):
            align_blocks(widths_LE, scores_LEI, A, [top_k] * L, across_layers=False)
        return
    aligned = align_blocks(widths_LE, scores_LEI, A, [top_k] * L, across_layers=False)
    assert not (aligned.widths_LE % A).any()
    assert kept_score(scores_LEI, aligned.widths_LE).tolist() == pytest.approx(best_L)
    assert bool((aligned.widths_LE.sum(-1) <= widths_LE.sum(-1)).all())
    assert bool(((aligned.widths_LE > 0).sum(-1) >= top_k).all())


@settings(deadline=None, max_examples=25)
@given(scores, widths, st.integers(1, 2))
def test_best_over_the_model(scores_LEI: Tensor, widths_LE: Tensor, top_k: int):
    def enough(candidate) -> bool:
        return all(sum(width > 0 for width in candidate[layer * E : (layer + 1) * E]) >= top_k for layer in range(L))

    best = best_by_trying(scores_LEI.flatten(0, 1), int(widths_LE.sum()), enough)
    if best < 0:
        with pytest.raises(CoverageError, match="too few"):
            align_blocks(widths_LE, scores_LEI, A, [top_k] * L, across_layers=True)
        return
    aligned = align_blocks(widths_LE, scores_LEI, A, [top_k] * L, across_layers=True)
    assert not (aligned.widths_LE % A).any()
    assert float(kept_score(scores_LEI, aligned.widths_LE).sum()) == pytest.approx(best)
    assert int(aligned.widths_LE.sum()) + aligned.unspent == int(widths_LE.sum())


def test_unused_channels_and_removed_experts_are_reported():
    scores_LEI = torch.tensor([[[9.0, 8.0, 7.0, 6.0], [1.0, 1.0, 0.0, 0.0]]], dtype=torch.float64)
    aligned = align_blocks(torch.tensor([[3, 2]]), scores_LEI, 2, [1], across_layers=True)
    assert aligned.widths_LE.tolist() == [[4, 0]]
    assert aligned.unspent == 1
    assert aligned.removed == [(0, 1)]


def test_experts_that_a_router_needs_are_kept_even_without_score():
    scores_LEI = torch.zeros(2, 3, 4, dtype=torch.float64)
    scores_LEI[0] = 5.0
    aligned = align_blocks(torch.full((2, 3), 2), scores_LEI, 2, [1, 2], across_layers=True)
    assert (aligned.widths_LE[1] > 0).sum() == 2
    assert int(aligned.widths_LE.sum()) == 12


@pytest.mark.parametrize("block_size", [0, 5, 8])
def test_block_size_must_divide(block_size: int):
    with pytest.raises(CoverageError, match="does not divide"):
        align_blocks(torch.full((L, E), I), torch.ones(L, E, I), block_size, [1, 1], across_layers=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scores_must_be_numbers(bad: float):
    scores_LEI = torch.ones(L, E, I)
    scores_LEI[1, 2, 0] = bad
    with pytest.raises(CoverageError, match="layer 1 expert 2"):
        align_blocks(torch.full((L, E), I), scores_LEI, A, [1, 1], across_layers=True)


@settings(deadline=None)
@given(
    st.lists(values, min_size=4 * I, max_size=4 * I).map(
        lambda flat: torch.tensor(flat, dtype=torch.float64).reshape(1, 4, I)
    ),
    st.integers(0, 4 * I),
    st.integers(1, 2),
)
def test_best_if_each_group_of_a_router_needs_experts(scores_LEI: Tensor, budget: int, needed: int):
    """There are two groups of two experts; the sum of the given widths is the budget."""

    def enough(candidate) -> bool:
        return all(sum(width > 0 for width in candidate[start : start + 2]) >= needed for start in (0, 2))

    widths_LE = torch.tensor([[min(max(budget - I * expert, 0), I) for expert in range(4)]])
    best = best_by_trying(scores_LEI[0], budget, enough)
    if best < 0:
        with pytest.raises(CoverageError, match="too few"):
            align_blocks(widths_LE, scores_LEI, A, [needed], across_layers=True, groups_L=[2])
        return
    aligned = align_blocks(widths_LE, scores_LEI, A, [needed], across_layers=True, groups_L=[2])
    assert enough(aligned.widths_LE[0].tolist())
    assert float(kept_score(scores_LEI, aligned.widths_LE).sum()) == pytest.approx(best)


def test_layers_may_have_different_groups():
    scores_LEI = torch.zeros(2, 4, 2, dtype=torch.float64)
    scores_LEI[:, :2] = 5.0
    aligned = align_blocks(torch.full((2, 4), 1), scores_LEI, 2, [1, 1], across_layers=False, groups_L=[1, 2])
    assert (aligned.widths_LE > 0).tolist() == [[True, True, False, False], [True, False, True, False]]
