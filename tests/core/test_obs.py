"""Optimal Brain Surgeon over channels, compared with least squares that are solved again at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_coverage_plugin.core.obs import PENDING, obs_scores, pooled_curvature
from moe_coverage_plugin.core.reconstruction import RIDGE

H, T = 3, 12
shapes = {"channels": st.integers(1, 5), "tokens": st.integers(1, T), "seed": st.integers(0, 10_000)}
ridges = st.sampled_from([1e-3, RIDGE, 0.3])


class Expert:
    """``down_proj``, activations with correlated channels, routing weights, and gradients at the output."""

    def __init__(self, channels: int, tokens: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.down_HI = randn(H, channels)
        mixing_II = torch.eye(channels, dtype=torch.float64) + 0.7 * randn(channels, channels)
        self.a_MI = randn(tokens, channels) @ mixing_II
        self.routing_weight_M = torch.rand(tokens, dtype=torch.float64, generator=generator)
        self.output_grad_MH = randn(tokens, H)

    @property
    def terms(self) -> tuple[Tensor, Tensor]:
        """Gram matrix ``G`` without ridge, and curvature ``D``, each as a sum over tokens."""
        gram_II = torch.zeros(self.a_MI.shape[1], self.a_MI.shape[1], dtype=torch.float64)
        curvature_II = torch.zeros_like(gram_II)
        for g, a_I, d_I in zip(self.routing_weight_M, self.a_MI, self.gradients, strict=True):
            gram_II += g**2 * torch.outer(a_I, a_I)
            curvature_II += torch.outer(d_I, d_I)
        return gram_II / len(self.a_MI), curvature_II

    @property
    def gradients(self) -> Tensor:
        """``d``, the gradients at the activations."""
        return self.output_grad_MH @ self.down_HI

    @property
    def moments(self) -> Tensor:
        """``Q``, the second moments of the gradients at the output."""
        return torch.stack([torch.outer(grad_H, grad_H) for grad_H in self.output_grad_MH]).sum(0)

    def stacked_rows(self, ridge: float) -> Tensor:
        """Rows whose Gram matrix is ``G`` with ridge: weighted activations, then rows of the ridge."""
        weighted_MI = self.routing_weight_M[:, None] * self.a_MI / len(self.a_MI) ** 0.5
        strength = (ridge * weighted_MI.square().sum(0).mean()).sqrt()
        return torch.cat([weighted_MI, strength * torch.eye(self.a_MI.shape[1], dtype=torch.float64)])


def scores_of(*experts: Expert, ridge: float = RIDGE) -> Tensor:
    grams, curvatures = zip(*(expert.terms for expert in experts), strict=True)
    return obs_scores(torch.stack(grams), torch.stack(curvatures), ridge)


def refitted(expert: Expert, rows_RI: Tensor, kept: list[int]) -> Tensor:
    """Columns ``[H, N]`` for the kept channels, fitted to the output of all original channels."""
    return torch.linalg.lstsq(rows_RI[:, kept], rows_RI @ expert.down_HI.T, driver="gelsd").solution.T


def rise(expert: Expert, rows_RI: Tensor, down_HN: Tensor, kept: list[int], channel: int) -> float:
    """Rise of the loss, by squared gradients, if ``channel`` is removed and the other kept channels are fitted."""
    others = [index for index in kept if index != channel]
    output_RH = rows_RI[:, [channel]] @ down_HN[:, [kept.index(channel)]].T
    fitted_NH = torch.linalg.lstsq(rows_RI[:, others], output_RH, driver="gelsd").solution
    error_RH = output_RH - rows_RI[:, others] @ fitted_NH
    return float((error_RH @ expert.output_grad_MH.T).square().sum())


def from_scratch(expert: Expert, ridge: float) -> tuple[list[int], list[float]]:
    """Order of removal and costs, with least squares solved again for every candidate at every step."""
    rows_RI = expert.stacked_rows(ridge)
    kept, order, costs = list(range(expert.a_MI.shape[1])), [], []
    while kept:
        down_HN = refitted(expert, rows_RI, kept)
        rises = {channel: rise(expert, rows_RI, down_HN, kept, channel) for channel in kept}
        order.append(min(rises, key=lambda channel: rises[channel]))
        costs.append(rises[order[-1]])
        kept.remove(order[-1])
    return order, costs


@given(**shapes, ridge=ridges)
def test_first_removal_costs_the_least_squares_rise(channels: int, tokens: int, seed: int, ridge: float):
    expert = Expert(channels, tokens, seed)
    rows_RI = expert.stacked_rows(ridge)
    everything = list(range(channels))
    rises = [rise(expert, rows_RI, expert.down_HI, everything, channel) for channel in everything]
    scores_I = scores_of(expert, ridge=ridge)[0]
    assert int(scores_I.argmin()) == rises.index(min(rises))
    assert float(scores_I.min()) == pytest.approx(min(rises), rel=1e-7)


@given(**shapes, ridge=ridges)
def test_order_and_scores_equal_refitting_from_scratch(channels: int, tokens: int, seed: int, ridge: float):
    expert = Expert(channels, tokens, seed)
    order, costs = from_scratch(expert, ridge)
    scores_I = scores_of(expert, ridge=ridge)[0]
    assert scores_I.argsort().tolist() == order
    highest_I = torch.tensor(costs, dtype=torch.float64).cummax(0).values
    torch.testing.assert_close(scores_I[order], highest_I, rtol=1e-7, atol=0)


@given(**shapes, ridge=ridges)
def test_scores_are_finite_not_negative_and_different(channels: int, tokens: int, seed: int, ridge: float):
    scores_I = scores_of(Expert(channels, tokens, seed), ridge=ridge)[0]
    assert scores_I.dtype == torch.float64
    assert bool(scores_I.isfinite().all())
    assert bool((scores_I >= 0).all())
    assert len(set(scores_I.tolist())) == channels


def test_scores_of_uncorrelated_channels_are_their_curvature():
    curvature_EI = torch.tensor([[3.0, 1.0, 2.0, 0.5], [1.0, 4.0, 0.0, 2.0]], dtype=torch.float64)
    gram_EII = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    assert torch.equal(obs_scores(gram_EII, curvature_EI.diag_embed(), ridge=0.0), curvature_EI)
    # the ridge is a part of a channel that others cannot fit
    scores_EI = obs_scores(gram_EII, curvature_EI.diag_embed())
    torch.testing.assert_close(scores_EI, (1 + RIDGE) * curvature_EI, rtol=1e-12, atol=0)


def test_first_of_two_identical_channels_has_almost_no_cost():
    """Scores are derived by hand, for activations of 1 and curvatures ``w_i w_j`` of columns ``w = (1, 1)``.

    Rounding decides which of the two is the first.
    """
    gram_II = torch.ones(2, 2, dtype=torch.float64)
    scores_I = obs_scores(gram_II[None], gram_II[None])[0].sort().values
    own = 1 + RIDGE
    first = own - 1 / own
    # the column of the second channel has been fitted to the output of the first, up to the ridge
    second = (1 + 1 / own) ** 2 * own
    torch.testing.assert_close(scores_I, torch.tensor([first, second], dtype=torch.float64), rtol=1e-9, atol=0)
    assert first < 0.006 * second


def test_a_linear_combination_of_two_channels_has_no_cost():
    expert = Expert(5, T, seed=0)
    expert.a_MI[:, 3] = expert.a_MI[:, 0] - 2 * expert.a_MI[:, 4]
    scores_I = scores_of(expert, ridge=1e-9)[0]
    # the first of the three dependent channels has no cost; the other two are then independent
    assert int((scores_I < 1e-6 * scores_I.max()).sum()) == 1
    assert int(scores_I.argmin()) in (0, 3, 4)


def test_experts_are_independent():
    experts = [Expert(5, tokens, seed) for seed, tokens in enumerate((2, 5, T))]
    separate = torch.cat([scores_of(expert) for expert in experts])
    torch.testing.assert_close(scores_of(*experts), separate, rtol=1e-12, atol=0)


def test_experts_without_tokens_or_activations_score_zero():
    gram_II, curvature_II = Expert(4, T, 0).terms
    zeros_II = torch.zeros_like(gram_II)
    curvature_EII = torch.stack([curvature_II, zeros_II, curvature_II])
    scores_EI = obs_scores(torch.stack([gram_II, zeros_II, zeros_II]), curvature_EII)
    assert bool((scores_EI[0] > 0).all())
    assert scores_EI[1:].tolist() == [[0.0] * 4] * 2


def test_nan_curvature_gives_nan_scores():
    gram_II, curvature_II = Expert(4, T, 0).terms
    bad_II = curvature_II.clone()
    bad_II[2, 2] = torch.nan
    scores_EI = obs_scores(torch.stack([gram_II, gram_II]), torch.stack([curvature_II, bad_II]))
    assert bool(scores_EI[0].isfinite().all())
    assert bool(scores_EI[1].isnan().any())


@given(scale=st.sampled_from([1e-12, 1e-3, 1e6]), seed=st.integers(0, 100))
def test_scores_scale_with_the_loss_and_with_the_activations(scale: float, seed: int):
    gram_EII, curvature_EII = (term_II[None] for term_II in Expert(5, T, seed).terms)
    expected_EI = scale * obs_scores(gram_EII, curvature_EII)
    torch.testing.assert_close(obs_scores(gram_EII, scale * curvature_EII), expected_EI, rtol=1e-9, atol=0)
    torch.testing.assert_close(obs_scores(scale * gram_EII, curvature_EII), expected_EI, rtol=1e-9, atol=0)


def test_last_score_of_many_channels_is_exact():
    """After hundreds of rank-one updates, only one channel is left, whose cost has a closed form."""
    expert = Expert(200, 400, seed=0)
    gram_II, curvature_II = expert.terms
    scores_I = scores_of(expert)[0]
    last = int(scores_I.argmax())
    gram_II.diagonal().add_(RIDGE * gram_II.diagonal().mean())
    # its column is fitted to the output of the unpruned expert
    column_H = expert.down_HI @ gram_II[:, last] / gram_II[last, last]
    cost = (expert.output_grad_MH @ column_H).square().sum() * gram_II[last, last]
    torch.testing.assert_close(scores_I[last], cost, rtol=1e-9, atol=0)
    assert scores_I.argsort()[0] == (curvature_II.diagonal() / torch.linalg.inv(gram_II).diagonal()).argmin()


def test_inputs_are_not_modified():
    gram_II, curvature_II = Expert(5, T, 0).terms
    before = (gram_II.clone(), curvature_II.clone())
    obs_scores(gram_II[None], curvature_II[None])
    assert torch.equal(gram_II, before[0])
    assert torch.equal(curvature_II, before[1])


# --- curvature from what the experts of a layer share


def pooled(down_HI: Tensor, output_HH: Tensor, diagonal_I: Tensor) -> Tensor:
    """Curvature of one expert."""
    return pooled_curvature(down_HI[None], output_HH, diagonal_I[None])[0]


def test_pooled_curvatures_of_experts_are_independent():
    experts = [Expert(5, T, seed) for seed in range(3)]
    moments_HH = torch.stack([expert.moments for expert in experts]).sum(0)
    down_EHI = torch.stack([expert.down_HI for expert in experts])
    diagonal_EI = torch.stack([expert.terms[1].diagonal() for expert in experts])
    expected = [pooled(*terms) for terms in zip(down_EHI, [moments_HH] * 3, diagonal_EI, strict=True)]
    torch.testing.assert_close(
        pooled_curvature(down_EHI, moments_HH, diagonal_EI), torch.stack(expected), rtol=1e-12, atol=0
    )


@given(**shapes)
def test_pooled_curvature_of_a_single_expert_is_exact(channels: int, tokens: int, seed: int):
    """If no other expert adds to the moments, nothing is estimated."""
    expert = Expert(channels, tokens, seed)
    curvature_II = expert.terms[1]
    found_II = pooled(expert.down_HI, expert.moments, curvature_II.diagonal())
    torch.testing.assert_close(found_II, curvature_II, rtol=1e-9, atol=1e-12)


def test_pooled_curvature_is_exact_if_all_experts_have_the_same_gradients():
    """The moments are then those of each expert times one factor, which the diagonal removes."""
    expert, pooled_HH = Expert(5, T, 0), 7 * Expert(5, T, 0).moments
    curvature_II = expert.terms[1]
    found_II = pooled(expert.down_HI, pooled_HH, curvature_II.diagonal())
    torch.testing.assert_close(found_II, curvature_II, rtol=1e-9, atol=1e-12)


@given(**shapes, others=st.integers(0, 3), factor=st.sampled_from([1e-9, 0.3, 1e9]))
def test_pooled_curvature_is_a_curvature_with_the_known_diagonal(
    channels: int, tokens: int, seed: int, others: int, factor: float
):
    """Symmetric, positive semidefinite, with the diagonal of ``D``, and independent of the scale of the moments."""
    expert = Expert(channels, tokens, seed)
    # the expert itself is one of them
    pooled_HH = torch.stack([Expert(channels, tokens, seed + other).moments for other in range(others + 1)]).sum(0)
    diagonal_I = expert.terms[1].diagonal()
    found_II = pooled(expert.down_HI, pooled_HH, diagonal_I)
    torch.testing.assert_close(found_II.diagonal(), diagonal_I, rtol=1e-9, atol=0)
    torch.testing.assert_close(found_II, found_II.T, rtol=1e-12, atol=1e-12 * float(diagonal_I.max()))
    assert float(torch.linalg.eigvalsh(found_II).min()) > -1e-9 * float(diagonal_I.sum())
    again_II = pooled(expert.down_HI, factor * pooled_HH, diagonal_I)
    torch.testing.assert_close(again_II, found_II, rtol=1e-9, atol=1e-12 * float(diagonal_I.max()))


def test_pooled_curvature_of_channels_without_gradient_is_zero():
    """A column of zeros, no known gradient, and an expert of a layer without any gradient."""
    expert = Expert(4, T, 0)
    expert.down_HI[:, 1] = 0.0
    diagonal_I = expert.terms[1].diagonal().clone()
    diagonal_I[3] = 0.0
    found_II = pooled(expert.down_HI, expert.moments, diagonal_I)
    assert bool(found_II.isfinite().all())
    assert not found_II[[1, 3]].any()
    assert not found_II[:, [1, 3]].any()
    torch.testing.assert_close(found_II.diagonal(), diagonal_I, rtol=1e-9, atol=0)
    without_II = pooled(expert.down_HI, torch.zeros_like(expert.moments), diagonal_I)
    assert torch.equal(without_II, torch.zeros_like(without_II))


def test_pooled_curvature_passes_nan_on():
    """Planners stop at scores that are not finite, so they must not become zeros here."""
    expert = Expert(4, T, 0)
    diagonal_I = expert.terms[1].diagonal().clone()
    diagonal_I[2] = torch.nan
    assert bool(pooled(expert.down_HI, expert.moments, diagonal_I)[2].isnan().all())
    moments_HH = torch.full_like(expert.moments, torch.nan)
    assert bool(pooled(expert.down_HI, moments_HH, expert.terms[1].diagonal()).isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pooled_curvature_is_at_least_float32(dtype: torch.dtype):
    expert = Expert(5, T, 0)
    expert.down_HI = expert.down_HI.to(dtype).double()
    curvature_II = expert.terms[1]
    found_II = pooled(expert.down_HI.to(dtype), expert.moments, curvature_II.diagonal())
    assert found_II.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found_II.double(), curvature_II, rtol=1e-4, atol=1e-4)


def test_a_gram_matrix_that_is_not_positive_definite():
    """Not one of real activations: it stops the scoring instead of becoming scores."""
    gram_EII = torch.diag_embed(torch.tensor([[1.0, 2.0, 3.0], [1.0, 4.0, -1.0]]))
    with pytest.raises(RuntimeError, match="not positive definite"):
        obs_scores(gram_EII, torch.eye(3).expand(2, 3, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no graphs")
@pytest.mark.parametrize("channels", [PENDING - 1, 2 * PENDING, 3 * PENDING, 5 * PENDING + 7])
def test_steps_of_a_graph_equal_steps_of_the_cpu(channels: int):
    """Fewer channels than a graph has, no replay, replays, and steps behind the last replay."""
    experts = [Expert(channels, 2 * channels, seed) for seed in range(3)]
    gram_EII, curvature_EII = (torch.stack(terms) for terms in zip(*(expert.terms for expert in experts), strict=True))
    gram_EII[1] = 0
    expected_EI = obs_scores(gram_EII, curvature_EII)
    for _ in range(2):
        found_EI = obs_scores(gram_EII.to("cuda"), curvature_EII.to("cuda")).cpu()
        torch.testing.assert_close(found_EI, expected_EI, rtol=1e-7, atol=0)
        assert torch.equal(found_EI.argsort(-1), expected_EI.argsort(-1))
