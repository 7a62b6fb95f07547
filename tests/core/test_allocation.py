from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.allocation import (
    InterLayer,
    IntraLayer,
    channel_budget,
    expert_widths,
    layer_budgets,
    proportional,
)
from moe_coverage_plugin.core.coverage import solve_coverage
from moe_coverage_plugin.manifest import CoverageError

weight_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("total", "sparsity", "kept"),
    [
        (10, 0, 10),
        (10, 0.25, 8),
        (10, 0.5, 5),
        (10, 0.949, 1),
        (10, 0.951, 0),
        (10, 0.999999, 0),
        (4718592, 0.25, 3538944),
    ],
)
def test_channel_budget_is_rounded_half_up(total: int, sparsity: float, kept: int) -> None:
    assert channel_budget(total, sparsity) == kept


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_sparsity_out_of_range_is_an_error(sparsity: float) -> None:
    with pytest.raises(CoverageError, match=f"sparsity is {sparsity}"):
        channel_budget(10, sparsity)
    with pytest.raises(CoverageError, match=f"sparsity is {sparsity}"):
        layer_budgets(torch.ones(2, 2, 2), None, "uniform", sparsity)


def test_proportional_by_hand() -> None:
    # shares 3.5 2.1 1.4 have floors 3 2 1; the remaining channel is assigned to the largest fraction
    assert proportional(torch.tensor([5.0, 3.0, 2.0]), 10, 7).tolist() == [4, 2, 1]
    # shares 6.4 .8 .8: the first is limited to its capacity of 4, and the others share its excess
    assert proportional(torch.tensor([8.0, 1.0, 1.0]), 4, 8).tolist() == [4, 2, 2]
    # the excess of the first makes the second exceed its capacity
    assert proportional(torch.tensor([10.0, 3.0, 1.0]), torch.tensor([4, 3, 9]), 12).tolist() == [4, 3, 5]
    # groups of weight zero share channels that exceed the capacity of the others, in equal parts
    assert proportional(torch.tensor([0.0, 1.0, 0.0]), 3, 3).tolist() == [0, 3, 0]
    assert proportional(torch.tensor([0.0, 1.0, 0.0]), 3, 6).tolist() == [2, 3, 1]
    assert proportional(torch.zeros(3), 3, 5).tolist() == [2, 2, 1]


@given(weights=weight_lists, capacity=st.integers(0, 20), share=st.floats(0, 1))
def test_proportional_meets_total_capacity_and_quota(weights: list[float], capacity: int, share: float) -> None:
    weights_G = torch.tensor(weights, dtype=torch.float64)
    total = round(share * capacity * len(weights))
    counts_G = proportional(weights_G, capacity, total)
    assert counts_G.dtype == torch.int64
    assert int(counts_G.sum()) == total
    assert bool(((counts_G >= 0) & (counts_G <= capacity)).all())
    # counts below the capacity are proportional to the weights, up to one channel of rounding
    inner = [(w, c) for w, c in zip(weights, counts_G.tolist(), strict=True) if w > 0 and c < capacity]
    for weight, count in inner:
        for other_weight, other_count in inner:
            assert (count + 1) / weight >= (other_count - 1) / other_weight - 1e-9
    if any(c > 0 for w, c in zip(weights, counts_G.tolist(), strict=True) if w == 0) and any(weights):
        assert all(c == capacity for w, c in zip(weights, counts_G.tolist(), strict=True) if w > 0)


@given(weights=weight_lists, scale=st.sampled_from([2.0**-1000, 2.0**900]))
def test_proportional_does_not_depend_on_the_scale_of_weights(weights: list[float], scale: float) -> None:
    weights_G = torch.tensor(weights, dtype=torch.float64)
    total = 3 * len(weights)
    assert proportional(weights_G * scale, 7, total).tolist() == proportional(weights_G, 7, total).tolist()


@pytest.mark.parametrize("total", [-1, 7])
def test_totals_out_of_range_and_nan_weights_are_errors(total: int) -> None:
    with pytest.raises(CoverageError, match=f"{total} channels cannot be shared among groups that hold 6"):
        proportional(torch.ones(2), 3, total)
    with pytest.raises(CoverageError, match="weights must be finite, but group 1 has nan"):
        proportional(torch.tensor([1.0, float("nan")]), 3, 2)


def model(seed: int = 0, layers: int = 5, experts: int = 4, channels: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "scores_LEI": torch.rand(layers, experts, channels, generator=generator),
        "loss_L": torch.rand(layers, generator=generator),
        "prior_LE": torch.rand(layers, experts, generator=generator),
    }


@pytest.mark.parametrize("inter", get_args(InterLayer))
@pytest.mark.parametrize("intra", get_args(IntraLayer))
@given(seed=st.integers(0, 2**32 - 1), sparsity=st.floats(0, 1, exclude_max=True))
def test_every_pair_of_strategies_meets_its_budgets(
    inter: InterLayer, intra: IntraLayer, seed: int, sparsity: float
) -> None:
    m = model(seed, layers=3, experts=3, channels=5)
    budgets_L = layer_budgets(m["scores_LEI"], m["loss_L"], inter, sparsity)
    widths_LE = expert_widths(m["scores_LEI"], budgets_L, m["prior_LE"], intra)
    assert budgets_L.dtype == widths_LE.dtype == torch.int64
    assert int(budgets_L.sum()) == channel_budget(45, sparsity)
    assert torch.equal(widths_LE.sum(-1), budgets_L)
    assert bool(((widths_LE >= 0) & (widths_LE <= 5)).all())


def test_uniform() -> None:
    m = model()
    # a tenth of 5 * 4 * 16 = 320 channels is removed: 288 are kept, 57.6 per layer
    budgets_L = layer_budgets(m["scores_LEI"], None, "uniform", 0.1)
    assert budgets_L.tolist() == [58, 58, 58, 57, 57]
    assert expert_widths(m["scores_LEI"], budgets_L, None, "uniform")[0].tolist() == [15, 15, 14, 14]


def test_u_shape_by_hand() -> None:
    # for depths 0, 1/2, 1, (x - 1/2)^2 is 1/4, 0, 1/4, standardized 1/sqrt(2), -sqrt(2), 1/sqrt(2); with the weights
    # 1.2475, 0.5050, 1.2475, the shares of 1500 channels are 623.74, 252.51, 623.74
    scores_LEI = torch.ones(3, 10, 100)
    assert layer_budgets(scores_LEI, None, "u_shaped", 0.5).tolist() == [624, 252, 624]
    # at 10 %, the first and the last layer keep all channels, and the middle layer has the remaining budget
    assert layer_budgets(scores_LEI, None, "u_shaped", 0.1).tolist() == [1000, 700, 1000]
    # with one or two layers, all layers have the same weight
    assert layer_budgets(scores_LEI[:2], None, "u_shaped", 0.5).tolist() == [500, 500]
    assert layer_budgets(scores_LEI[:1], None, "u_shaped", 0.5).tolist() == [500]


def test_widths_are_proportional_to_loss_and_priors() -> None:
    scores_LEI = torch.ones(2, 2, 10)
    assert layer_budgets(scores_LEI, torch.tensor([1.0, 3.0]), "loss", 0.5).tolist() == [5, 15]
    prior_LE = torch.tensor([[4.0, 1.0], [0.0, 2.0]])
    for strategy in ("loss", "router_weight", "usage"):
        widths_LE = expert_widths(scores_LEI, torch.tensor([5, 12]), prior_LE, strategy)
        assert widths_LE.tolist() == [[4, 1], [2, 10]]


def test_topk_channel_keeps_the_best_of_the_layer() -> None:
    m = model()
    widths_LE = expert_widths(m["scores_LEI"], torch.tensor([1, 7, 30, 63, 64]), None, "topk_channel")
    for scores_EI, widths_E, budget in zip(m["scores_LEI"], widths_LE, [1, 7, 30, 63, 64], strict=True):
        best = scores_EI.flatten().topk(budget).indices // 16
        assert widths_E.tolist() == torch.bincount(best, minlength=4).tolist()


def test_coverage_between_layers_pools_experts_and_uses_the_loss() -> None:
    m = model()
    budgets_L = layer_budgets(m["scores_LEI"], m["loss_L"], "coverage", 0.4)
    assert budgets_L.tolist() == solve_coverage(m["scores_LEI"].reshape(5, 64), m["loss_L"], 192).tolist()
    widths_LE = expert_widths(m["scores_LEI"], budgets_L, m["prior_LE"], "coverage")
    for layer in range(5):
        alone_E = solve_coverage(m["scores_LEI"][layer], m["prior_LE"][layer], int(budgets_L[layer]))
        assert widths_LE[layer].tolist() == alone_E.tolist()


def test_missing_importance_is_an_error() -> None:
    m = model()
    for strategy in ("loss", "coverage"):
        with pytest.raises(CoverageError, match=f"'{strategy}' needs the importance of every layer"):
            layer_budgets(m["scores_LEI"], None, strategy, 0.5)
        with pytest.raises(CoverageError, match=f"'{strategy}' needs the importance of every expert"):
            expert_widths(m["scores_LEI"], torch.full((5,), 10), None, strategy)


@pytest.mark.parametrize("strategy", ["topk_channel", "coverage"])
def test_nan_scores_are_an_error_that_names_the_expert(strategy: IntraLayer) -> None:
    m = model()
    m["scores_LEI"][3, 2, 1] = float("nan")
    with pytest.raises(CoverageError, match="layer 3 expert 2"):
        expert_widths(m["scores_LEI"], torch.full((5,), 10), m["prior_LE"], strategy)
    with pytest.raises(CoverageError, match="layer 3 expert 2"):
        layer_budgets(m["scores_LEI"], m["loss_L"], "coverage", 0.5)
