"""The closed form of reconstruction, compared with a direct solution of least squares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_coverage_plugin.core.reconstruction import gram, reconstruct_down

H, I, T = 5, 8, 40  # noqa: E741 - the axis letters


def expert(seed: int, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """``down_proj``, activations with correlated channels, and routing weights, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mixed_TI = randn(tokens, I) @ (torch.eye(I, dtype=torch.float64) + 0.7 * randn(I, I))
    return randn(H, I), mixed_TI, torch.rand(tokens, dtype=torch.float64, generator=generator)


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
