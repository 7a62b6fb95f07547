"""The closed form of reconstruction, compared with a direct solution of least squares."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_coverage_plugin.core import reconstruction
from moe_coverage_plugin.core.reconstruction import RIDGE, RIDGES, best_fit, gram

H, I, T = 5, 8, 40  # noqa: E741 - the axis letters


def expert(seed: int, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """``down_proj``, activations with correlated channels, and routing weights, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mixed_TI = randn(tokens, I) @ (torch.eye(I, dtype=torch.float64) + 0.7 * randn(I, I))
    return randn(H, I), mixed_TI, torch.rand(tokens, dtype=torch.float64, generator=generator)


def reconstruct_down(down_HI: Tensor, gram_II: Tensor, kept_N: Tensor, ridge: float = RIDGE) -> Tensor:
    """Of one expert."""
    ridge_E = torch.tensor([ridge], dtype=torch.float64)
    return reconstruction.reconstruct_down(down_HI[None], gram_II[None], kept_N[None], ridge_E)[0]


def choose_ridge(down_HI: Tensor, fitted_II: Tensor, held_II: Tensor, kept_N: Tensor) -> float:
    """Of one expert."""
    return float(reconstruction.choose_ridge(down_HI[None], fitted_II[None], held_II[None], kept_N[None]))


def direct(down_HI: Tensor, a_TI: Tensor, routing_weight_T: Tensor, kept_N: Tensor, ridge: float) -> Tensor:
    """The minimum by one least-squares system with rows of tokens and rows of the ridge."""
    weighted_TN = routing_weight_T[:, None] * a_TI[:, kept_N]
    strength = (ridge * weighted_TN.square().sum(0).mean()).sqrt()
    rows = torch.cat([weighted_TN, strength * torch.eye(len(kept_N), dtype=torch.float64)])
    target = torch.cat([routing_weight_T[:, None] * (a_TI @ down_HI.T), strength * down_HI[:, kept_N].T])
    return torch.linalg.lstsq(rows, target).solution.T


@settings(deadline=None)
@given(
    st.integers(0, 10_000), st.sets(st.integers(0, I - 1), min_size=1, max_size=I - 1), st.sampled_from([1e-3, 0.1])
)
def test_is_the_ridge_solution(seed: int, kept: set[int], ridge: float):
    down_HI, a_TI, routing_weight_T = expert(seed)
    kept_N = torch.tensor(sorted(kept))
    found_HN = reconstruct_down(down_HI, gram(a_TI, routing_weight_T), kept_N, ridge)
    torch.testing.assert_close(found_HN, direct(down_HI, a_TI, routing_weight_T, kept_N, ridge), rtol=1e-7, atol=1e-9)


def test_output_is_closer_to_the_unpruned_expert_than_without_reconstruction():
    down_HI, a_TI, routing_weight_T = expert(0)
    kept_N = torch.tensor([0, 2, 3, 6])
    unpruned_TH = routing_weight_T[:, None] * (a_TI @ down_HI.T)

    def error(down_HN: Tensor) -> float:
        return float((routing_weight_T[:, None] * (a_TI[:, kept_N] @ down_HN.T) - unpruned_TH).square().sum())

    assert error(reconstruct_down(down_HI, gram(a_TI, routing_weight_T), kept_N)) < 0.5 * error(down_HI[:, kept_N])


def test_removing_a_channel_that_is_a_multiple_of_another_changes_no_output():
    down_HI, a_TI, routing_weight_T = expert(0)
    a_TI[:, 5] = 2 * a_TI[:, 1]
    kept_N = torch.tensor([index for index in range(I) if index != 5])
    found_HN = reconstruct_down(down_HI, gram(a_TI, routing_weight_T), kept_N, ridge=1e-9)
    torch.testing.assert_close(a_TI[:, kept_N] @ found_HN.T, a_TI @ down_HI.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [list(range(I)), []])
def test_columns_are_unchanged_if_all_or_no_channels_are_kept(kept: list[int]):
    down_HI, a_TI, routing_weight_T = expert(0)
    kept_N = torch.tensor(kept, dtype=torch.int64)
    assert torch.equal(reconstruct_down(down_HI, gram(a_TI, routing_weight_T), kept_N), down_HI[:, kept_N])


def test_expert_without_tokens_keeps_its_columns():
    down_HI, _, _ = expert(0)
    kept_N = torch.tensor([1, 4])
    assert torch.equal(reconstruct_down(down_HI, torch.zeros(I, I), kept_N), down_HI[:, kept_N])


def test_fewer_tokens_than_channels_is_solved():
    down_HI, a_TI, routing_weight_T = expert(3, tokens=2)
    kept_N = torch.tensor([0, 1, 2, 3, 4, 5])
    found_HN = reconstruct_down(down_HI, gram(a_TI, routing_weight_T), kept_N)
    torch.testing.assert_close(found_HN, direct(down_HI, a_TI, routing_weight_T, kept_N, 1e-2), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keeps_the_dtype_and_sums_in_float32_or_wider(dtype: torch.dtype):
    down_HI, a_TI, routing_weight_T = expert(0)
    gram_II = gram(a_TI.to(dtype), routing_weight_T.to(dtype))
    assert gram_II.dtype == torch.float32
    found_HN = reconstruct_down(down_HI.to(dtype), gram_II, torch.tensor([0, 2, 3, 6]))
    assert found_HN.dtype == dtype
    exact_HN = reconstruct_down(down_HI, gram(a_TI, routing_weight_T), torch.tensor([0, 2, 3, 6]))
    torch.testing.assert_close(found_HN.double(), exact_HN, rtol=0.1, atol=0.1)


def test_gram_adds_over_batches():
    _, a_TI, routing_weight_T = expert(0)
    parts = gram(a_TI[:7], routing_weight_T[:7]) + gram(a_TI[7:], routing_weight_T[7:])
    torch.testing.assert_close(parts, gram(a_TI, routing_weight_T))


# --- the ridge, chosen by held-back tokens

kept_sets = st.sets(st.integers(0, I - 1), min_size=1, max_size=I - 1)
token_counts = st.integers(1, T)


class Case:
    """An expert, the tokens that are fitted and those that are held back."""

    def __init__(self, seed: int, fitted: int, held: int):
        self.down_HI, a_TI, routing_weight_T = expert(seed, fitted + held)
        self.fitted, self.held = zip(a_TI.split([fitted, held]), routing_weight_T.split([fitted, held]), strict=True)

    def chosen(self, kept_N: Tensor, factor: float = 1.0) -> float:
        fitted_II, held_II = (factor * gram(*tokens) for tokens in (self.fitted, self.held))
        return choose_ridge(self.down_HI, fitted_II, held_II, kept_N)

    def held_error(self, kept_N: Tensor, ridge: float) -> float:
        """The sum over held-back tokens of the squared error of the columns that are fitted to the others."""
        down_HN = reconstruct_down(self.down_HI, gram(*self.fitted), kept_N, ridge)
        error = 0.0
        for a_I, routing_weight in zip(*self.held, strict=True):
            rest_H = routing_weight * (self.down_HI @ a_I - down_HN @ a_I[kept_N])
            error += float(rest_H.square().sum())
        return error


@settings(deadline=None)
@given(st.integers(0, 10_000), kept_sets, token_counts, token_counts)
def test_chosen_ridge_gains_most(seed: int, kept: set[int], fitted: int, held: int):
    """Compared with the sum over held-back tokens for each ridge; no fit is one of them, so none is worse than it."""
    case, kept_N = Case(seed, fitted, held), torch.tensor(sorted(kept))
    before, *gains = (case.held_error(kept_N, ridge) for ridge in (math.inf, *RIDGES[:-1]))
    gains = {ridge: before - error for ridge, error in zip(RIDGES, gains, strict=False)}
    chosen, most = case.chosen(kept_N), max(gains.values())
    rounding = 1e-9 * before
    assert chosen in RIDGES
    assert (chosen == math.inf) == (most <= 0) or abs(most) <= rounding
    if chosen != math.inf:
        assert gains[chosen] >= most - rounding


def test_the_first_of_the_fits_that_gain_most_is_taken():
    """Of each column."""
    cases = {
        (0.84, 1.0, 0.86, -1.0): 1,
        (1.0, 1.0, 1.0, 1.0): 0,
        (0.0, -1.0, 0.0, -3.0): None,
        (-1.0, 1e-12, -1.0, -1.0): 1,
        (math.nan, math.nan, math.nan, math.nan): None,
        (-math.inf, math.nan, 2.0, 1.0): 2,
        (-math.inf, -math.inf, -math.inf, -math.inf): None,
    }
    fit_E, better_E = best_fit(torch.tensor(list(cases), dtype=torch.float64).T)
    found = [fit if better else None for fit, better in zip(fit_E.tolist(), better_E.tolist(), strict=True)]
    assert found == list(cases.values())


def test_each_ridge_is_chosen_for_some_expert():
    """The property above would also hold for a list of one ridge that is never the best."""
    chosen = {Case(seed, 1 + seed % 12, 40).chosen(torch.tensor([0, 2, 3, 6])) for seed in range(300)}
    assert chosen == set(RIDGES)


def test_a_pruned_channel_that_is_a_small_sum_of_kept_ones_needs_the_least_ridge():
    """A ridge shrinks what kept channels take over, most where they are small."""
    case, kept_N = Case(0, 30, 30), torch.arange(4)
    for a_TI, _ in (case.fitted, case.held):
        a_TI[:, 3] *= 0.03
        a_TI[:, 4:] = 30 * a_TI[:, 3:4]
    assert case.chosen(kept_N) == min(RIDGES)


def test_no_fit_if_held_back_tokens_are_unrelated():
    """Kept and pruned channels agree on the tokens that are fitted, and are opposite on those held back."""
    case, kept_N = Case(0, 30, 10), torch.tensor([0, 1, 2, 3])
    for (a_TI, _), sign in ((case.fitted, 1), (case.held, -1)):
        a_TI[:, 4:] = sign * a_TI[:, :4]
    assert case.chosen(kept_N) == math.inf
    case.held[0][:, 4:] *= -1
    assert case.chosen(kept_N) < math.inf


@pytest.mark.parametrize(("fitted", "held"), [(0, 10), (10, 0), (0, 0)])
def test_no_fit_without_tokens_on_both_sides(fitted: int, held: int):
    assert Case(0, fitted, held).chosen(torch.tensor([0, 2])) == math.inf


@pytest.mark.parametrize("kept", [list(range(I)), []])
def test_no_fit_if_all_or_no_channels_are_kept(kept: list[int]):
    assert Case(0, 30, 10).chosen(torch.tensor(kept, dtype=torch.int64)) == math.inf


@pytest.mark.parametrize("side", ["fitted", "held"])
def test_no_fit_if_kept_channels_are_never_active_on_one_side(side: str):
    case = Case(0, 30, 10)
    getattr(case, side)[0][:, [0, 2]] = 0.0
    assert case.chosen(torch.tensor([0, 2])) == math.inf


@given(st.integers(0, 200), st.sampled_from([2.0**-40, 1e-6, 1e9]))
def test_the_ridge_does_not_depend_on_the_scale_of_activations_or_weights(seed: int, factor: float):
    case, kept_N = Case(seed, 1 + seed % 12, 10), torch.tensor([0, 2, 3, 6])
    expected = case.chosen(kept_N)
    assert case.chosen(kept_N, factor) == expected
    case.down_HI *= factor
    assert case.chosen(kept_N) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_ridge_of_weights_in_16_bits(dtype: torch.dtype):
    case, kept_N = Case(0, 30, 10), torch.tensor([0, 2, 3, 6])
    case.down_HI = case.down_HI.to(dtype)
    rounded = case.chosen(kept_N)
    case.down_HI = case.down_HI.double()
    assert rounded == case.chosen(kept_N) < math.inf


def test_no_fit_is_the_old_columns():
    case, kept_N = Case(0, 30, 10), torch.tensor([0, 2, 3, 6])
    assert torch.equal(reconstruct_down(case.down_HI, gram(*case.fitted), kept_N, math.inf), case.down_HI[:, kept_N])


# --- experts together


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, I - 1), st.data())
def test_experts_do_not_change_each_other(seed: int, experts: int, width: int, data: st.DataObject):
    """Of equal width, with other channels each; some without tokens, one with values that are not finite."""
    sizes = [
        data.draw(st.tuples(st.sampled_from([0, 1, 5, T]), st.sampled_from([0, 1, 5, T]))) for _ in range(experts)
    ]
    cases = [Case(seed + index, *each) for index, each in enumerate(sizes)]
    kept_EN = torch.stack(
        [torch.randperm(I, generator=torch.Generator().manual_seed(seed + index))[:width] for index in range(experts)]
    )
    kept_EN = kept_EN.sort(dim=1).values
    down_EHI = torch.stack([case.down_HI for case in cases])
    fitted_EII, held_EII = (torch.stack([gram(*getattr(case, side)) for case in cases]) for side in ("fitted", "held"))
    bad = data.draw(st.integers(-1, experts - 1))
    if bad >= 0:
        fitted_EII[bad, 0, 0] = math.nan
    ridge_E = reconstruction.choose_ridge(down_EHI, fitted_EII, held_EII, kept_EN)
    found_EHN = reconstruction.reconstruct_down(down_EHI, fitted_EII, kept_EN, ridge_E)
    for index, case in enumerate(cases):
        if index == bad:
            continue
        alone = choose_ridge(case.down_HI, fitted_EII[index], held_EII[index], kept_EN[index])
        assert float(ridge_E[index]) == alone
        expected_HN = reconstruct_down(case.down_HI, fitted_EII[index], kept_EN[index], alone)
        torch.testing.assert_close(found_EHN[index], expected_HN, rtol=1e-9, atol=1e-12)


def test_a_matrix_that_is_not_positive_definite_is_no_fit():
    """A Gram matrix is, but for rounding; nothing is fitted by one that is far from it."""
    case, kept_N = Case(0, 30, 10), torch.tensor([0, 2, 3, 6])
    fitted_II = gram(*case.fitted)
    fitted_II[0, 2] = fitted_II[2, 0] = 10 * fitted_II.diagonal().max()
    ridge = choose_ridge(case.down_HI, fitted_II, gram(*case.held), kept_N)
    assert torch.equal(reconstruct_down(case.down_HI, fitted_II, kept_N), case.down_HI[:, kept_N])
    assert ridge == math.inf
