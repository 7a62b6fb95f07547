import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.plan import binary_search_coverage
from moe_coverage_plugin.core.coverage import count_smallest, coverage_thresholds, solve_coverage
from moe_coverage_plugin.core.ragged import sort_descending
from moe_coverage_plugin.manifest import CoverageError

seeds = st.integers(0, 2**32 - 1)


def random_problem(seed: int, groups: int, channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores_GD = torch.randn(groups, channels, dtype=torch.float64, generator=generator).exp()
    prior_G = torch.rand(groups, dtype=torch.float64, generator=generator) + 0.05
    return scores_GD, prior_G


def both_levels(scores_LEI: Tensor, layer_prior_L: Tensor, expert_prior_LE: Tensor, budget: int) -> Tensor:
    """Widths by the paper's two levels: the budget is split over layers, then over the experts of each layer."""
    budgets_L = solve_coverage(scores_LEI.flatten(1), layer_prior_L, budget)
    return solve_coverage(scores_LEI, expert_prior_LE, budgets_L)


def exact_coverage(scores: list[list[int]], prior: list[int], budget: int) -> list[int]:
    """The definition in rational arithmetic, with explicit rules for equal thresholds and zeros."""
    if not any(prior):
        prior = [1] * len(prior)
    entries = []
    for group, (row, phi) in enumerate(zip(scores, prior, strict=True)):
        ordered = sorted(row, reverse=True)
        for n, score in enumerate(ordered, start=1):
            # channels with score zero come last, before them those of groups with importance zero
            last = 2 if score == 0 else int(phi == 0)
            threshold = Fraction(sum(ordered[: n - 1]), sum(ordered) * phi) if last == 0 else 0
            entries.append((last, threshold, n, group))
    chosen = [group for *_, group in sorted(entries)[:budget]]
    return [chosen.count(group) for group in range(len(scores))]


@given(data=st.data())
def test_equals_the_definition_in_rational_arithmetic(data: st.DataObject) -> None:
    groups, channels = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 4), min_size=channels, max_size=channels)
    scores = data.draw(st.lists(row, min_size=groups, max_size=groups))
    # powers of two, so that the division by phi is exact and equal thresholds are equal in floating point
    prior = data.draw(st.lists(st.sampled_from([0, 1, 2, 4]), min_size=groups, max_size=groups))
    budget = data.draw(st.integers(0, groups * channels))
    counts_G = solve_coverage(torch.tensor(scores, dtype=torch.float64), torch.tensor(prior).double(), budget)
    assert counts_G.dtype == torch.int64
    assert counts_G.tolist() == exact_coverage(scores, prior, budget)


@given(seed=seeds, groups=st.integers(1, 9), channels=st.integers(1, 40), share=st.floats(0, 1))
def test_equals_the_papers_search_at_fine_tolerance(seed: int, groups: int, channels: int, share: float) -> None:
    scores_GD, prior_G = random_problem(seed, groups, channels)
    # the search cannot meet a budget below one channel per group, because every positive alpha keeps one in each group
    budget = groups + round(share * groups * (channels - 1))
    found_G = binary_search_coverage(scores_GD, prior_G, budget, tolerance=0)
    assert solve_coverage(scores_GD, prior_G, budget).tolist() == found_G.tolist()


@given(seed=seeds, groups=st.integers(2, 9), channels=st.integers(1, 20), share=st.floats(0, 1))
def test_order_of_groups_and_channels_does_not_matter(seed: int, groups: int, channels: int, share: float) -> None:
    scores_GD, prior_G = random_problem(seed, groups, channels)
    budget = groups + round(share * groups * (channels - 1))
    generator = torch.Generator().manual_seed(seed)
    group_order = torch.randperm(groups, generator=generator)
    channel_order = torch.randperm(channels, generator=generator)
    counts_G = solve_coverage(scores_GD, prior_G, budget)
    shuffled_G = solve_coverage(scores_GD[group_order][:, channel_order], prior_G[group_order], budget)
    assert shuffled_G.tolist() == counts_G[group_order].tolist()


@given(seed=seeds, groups=st.integers(1, 5), channels=st.integers(1, 8))
def test_one_more_channel_of_budget_adds_one_channel(seed: int, groups: int, channels: int) -> None:
    scores_GD, prior_G = random_problem(seed, groups, channels)
    before_G = torch.zeros(groups, dtype=torch.int64)
    for budget in range(1, groups * channels + 1):
        counts_G = solve_coverage(scores_GD, prior_G, budget)
        assert int(counts_G.sum()) == budget
        assert bool((counts_G >= before_G).all())
        before_G = counts_G
    assert before_G.tolist() == [channels] * groups


@given(seed=seeds, scale=st.sampled_from([2.0**-900, 2.0**-40, 2.0**40]))
def test_counts_do_not_depend_on_the_scale_of_scores_and_priors(seed: int, scale: float) -> None:
    scores_GD, prior_G = random_problem(seed, 4, 10)
    counts_G = solve_coverage(scores_GD, prior_G, 17)
    assert solve_coverage(scores_GD * scale, prior_G, 17).tolist() == counts_G.tolist()
    assert solve_coverage(scores_GD, prior_G * scale, 17).tolist() == counts_G.tolist()
    one_group = torch.tensor([scale, 1, 1, 1], dtype=torch.float64)[:, None]
    assert solve_coverage(scores_GD * one_group, prior_G, 17).tolist() == counts_G.tolist()


def test_worked_example_of_two_layers() -> None:
    # layer 0 has experts (6, 3, 1) and (5, 4, 1), pooled and sorted 6 5 4 3 1 1, total 20
    # layer 1 has experts (10, 6, 0) and (2, 1, 1), pooled and sorted 10 6 2 1 1 0, total 20
    scores_LEI = torch.tensor([[[6, 3, 1], [1, 5, 4]], [[0, 6, 10], [2, 1, 1]]], dtype=torch.float64)
    #
    # budget 6, equal layers; thresholds S(n-1)/20 are
    #   layer 0:  0  .3  .55  .75  .9  .95
    #   layer 1:  0  .5  .8   .9   .95  1
    # the six smallest are 0 0 .3 .5 .55 .75, so layer 0 keeps 4 channels and layer 1 keeps 2
    # inside layer 0, phi = (1, 2); thresholds are 0 6/10 9/10 of expert 0 and 0 5/20 9/20 of expert 1;
    # the four smallest are 0 0 .25 .45, so the experts keep 1 and 3 channels
    # inside layer 1, phi = (1, 1), so each expert keeps its first channel
    expert_prior_LE = torch.tensor([[1.0, 2.0], [1.0, 1.0]])
    widths_LE = both_levels(scores_LEI, torch.tensor([1.0, 1.0]), expert_prior_LE, 6)
    assert widths_LE.tolist() == [[1, 3], [1, 1]]
    #
    # budget 7, layer 1 twice as important: its thresholds are 0 .25 .4 .45 .475 .5, and the seven smallest are
    # 0 0 .25 .3 .4 .45 .475, so layer 0 keeps 2 channels and layer 1 keeps 5
    # inside layer 1, thresholds are 0 10/16 1 of expert 0 and 0 2/4 3/4 of expert 1; the five smallest are all except
    # 1, so the experts keep 2 and 3 channels
    widths_LE = both_levels(scores_LEI, torch.tensor([1.0, 2.0]), expert_prior_LE, 7)
    assert widths_LE.tolist() == [[1, 1], [2, 3]]


@given(seed=seeds, share=st.floats(0, 1))
def test_plan_uses_the_budget_exactly(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_LEI = torch.rand(3, 4, 5, generator=generator)  # accumulators can be float32
    budget = round(share * scores_LEI.numel())
    widths_LE = both_levels(
        scores_LEI, torch.rand(3, generator=generator), torch.rand(3, 4, generator=generator), budget
    )
    assert int(widths_LE.sum()) == budget
    assert bool(((widths_LE >= 0) & (widths_LE <= 5)).all())


def test_batch_solves_each_problem() -> None:
    scores, priors = zip(*(random_problem(seed, 3, 7) for seed in range(4)), strict=True)
    budgets = [0, 5, 12, 21]
    counts_BG = solve_coverage(torch.stack(scores), torch.stack(priors), torch.tensor(budgets))
    for index, budget in enumerate(budgets):
        assert counts_BG[index].tolist() == solve_coverage(scores[index], priors[index], budget).tolist()


def test_groups_of_zero_importance_share_the_remaining_budget_equally() -> None:
    scores_GD, _ = random_problem(0, 4, 5)
    prior_G = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert solve_coverage(scores_GD, prior_G, 4).tolist() == [0, 4, 0, 0]
    assert solve_coverage(scores_GD, prior_G, 13).tolist() == [3, 5, 3, 2]


def test_all_zero_scores_and_priors_are_treated_as_equal() -> None:
    zero_GD, zero_G = torch.zeros(3, 4), torch.zeros(3)
    assert solve_coverage(zero_GD, torch.ones(3), 7).tolist() == [3, 2, 2]
    assert solve_coverage(zero_GD, zero_G, 7).tolist() == [3, 2, 2]
    scores_GD, _ = random_problem(1, 3, 4)
    assert solve_coverage(scores_GD, zero_G, 7).tolist() == solve_coverage(scores_GD, torch.ones(3), 7).tolist()


def test_thresholds_equal_their_definition() -> None:
    scores_GD = torch.tensor([[4.0, 3.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    thresholds_GD = coverage_thresholds(scores_GD, torch.tensor([2.0, 0.5]))
    expected = [[0, 4 / 16, 7 / 16], [math.inf] * 3]
    torch.testing.assert_close(thresholds_GD, torch.tensor(expected, dtype=torch.float64))
    last_of_all = coverage_thresholds(scores_GD, torch.tensor([0.0, 1.0]))[0]
    assert bool(last_of_all.isfinite().all())
    assert float(last_of_all.min()) > 1e300


def test_channels_with_score_zero_need_no_budget() -> None:
    """An alpha that covers a group needs its positive scores only, however important the group is."""
    scores_LEI = torch.ones(2, 8, 64, dtype=torch.float64)
    scores_LEI[0, 4:] = 0
    layers_LD = scores_LEI.flatten(1)
    assert solve_coverage(layers_LD, torch.tensor([3.0, 1.0]), 512).tolist() == [256, 256]
    assert solve_coverage(scores_LEI[0], torch.ones(8), 256).tolist() == [64] * 4 + [0] * 4
    # what is left over is shared evenly
    assert solve_coverage(layers_LD, torch.tensor([3.0, 1.0]), 800).tolist() == [288, 512]


def test_a_group_without_scores_needs_no_budget() -> None:
    scores_GD, _ = random_problem(3, 4, 256)
    scores_GD[3] = 0
    counts_G = solve_coverage(scores_GD, torch.ones(4), 512)
    assert counts_G[3] == 0
    assert counts_G[:3].tolist() == solve_coverage(scores_GD[:3], torch.ones(3), 512).tolist()


@given(seed=seeds, budget=st.integers(0, 24))
def test_count_smallest_takes_the_smallest(seed: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values_GD = torch.randint(0, 5, (4, 6), generator=generator).double().sort(dim=-1).values
    entries = [(float(values_GD[g, d]), d, g) for g in range(4) for d in range(6)]
    chosen = [group for *_, group in sorted(entries)[:budget]]
    assert count_smallest(values_GD, budget).tolist() == [chosen.count(group) for group in range(4)]


@pytest.mark.parametrize("budget", [-1, 13])
def test_budget_out_of_range_is_an_error(budget: int) -> None:
    with pytest.raises(CoverageError, match=rf"budget of {budget} channels is outside 0\.\.12"):
        solve_coverage(torch.ones(3, 4), torch.ones(3), budget)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_invalid_numbers_are_errors_that_name_the_group(bad: float) -> None:
    scores_LEI, layer_prior_L, expert_prior_LE = torch.ones(2, 3, 4), torch.ones(2), torch.ones(2, 3)
    broken_LEI = scores_LEI.clone()
    broken_LEI[1, 2, 3] = bad
    with pytest.raises(CoverageError, match=r"channel scores must .* layer 1 group 2 has"):
        solve_coverage(broken_LEI, expert_prior_LE, torch.tensor([5, 5]))
    with pytest.raises(CoverageError, match=r"channel scores must .*, but group 2 has"):
        solve_coverage(broken_LEI[1], expert_prior_LE[1], 5)
    layer_prior_L[1] = bad
    with pytest.raises(CoverageError, match=r"importances must .* group 1 has"):
        solve_coverage(scores_LEI.flatten(1), layer_prior_L, 5)
    expert_prior_LE[0, 1] = bad
    with pytest.raises(CoverageError, match=r"importances must .* layer 0 group 1 has"):
        solve_coverage(scores_LEI, expert_prior_LE, torch.tensor([5, 5]))


def test_pooled_layer_counts_every_channel_once() -> None:
    generator = torch.Generator().manual_seed(5)
    scores_LEI = torch.rand(2, 3, 4, dtype=torch.float64, generator=generator)
    layer_prior_L = torch.tensor([1.0, 3.0])
    widths_LE = both_levels(scores_LEI, layer_prior_L, torch.ones(2, 3), 13)
    pooled = [sorted(layer.flatten().tolist(), reverse=True) for layer in scores_LEI]
    thresholds = sorted(
        (sum(row[:n]) / sum(row) / phi, layer)
        for layer, (row, phi) in enumerate(zip(pooled, layer_prior_L.tolist(), strict=True))
        for n in range(12)
    )
    layers = [layer for _, layer in thresholds[:13]]
    assert widths_LE.sum(-1).tolist() == [layers.count(0), layers.count(1)]
    assert sort_descending(scores_LEI.flatten(1)).tolist() == pooled
