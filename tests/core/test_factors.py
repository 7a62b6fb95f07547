"""Factors of inverse matrices, compared with the inverse in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.core import factors
from moe_coverage_plugin.core.factors import inverse_cholesky, inverse_factor

SIZES = pytest.mark.parametrize(
    ("size", "block"), [(0, 512), (1, 512), (7, 3), (32, 32), (65, 16), (300, 256), (300, 512), (384, 512)]
)


def matrices(size: int, damping: float = 1e-2, spread: float = 2.0) -> Tensor:
    """Three symmetric matrices ``[3, A, A]`` whose diagonals span ``10^(2 spread)``, in float64."""
    generator = torch.Generator().manual_seed(size)
    scales_A = torch.logspace(-spread / 2, spread / 2, size, dtype=torch.float64)
    x_EMA = torch.randn(3, 2 * size + 1, size, dtype=torch.float64, generator=generator) * scales_A
    found_EAA = x_EMA.mT @ x_EMA
    diagonal_EA = found_EAA.diagonal(dim1=1, dim2=2)
    diagonal_EA += damping * diagonal_EA.mean(1, keepdim=True)
    return found_EAA


@SIZES
def test_the_product_of_factors_is_the_inverse(monkeypatch: pytest.MonkeyPatch, size: int, block: int):
    monkeypatch.setattr(factors, "BLOCK", block)
    matrix_EAA = matrices(size)
    factor_EAA, solved_E = inverse_factor(matrix_EAA.clone())
    assert solved_E.tolist() == [True] * 3
    assert torch.equal(factor_EAA, factor_EAA.triu())
    torch.testing.assert_close(factor_EAA, torch.linalg.cholesky(matrix_EAA.inverse(), upper=True))


@SIZES
def test_inverses_of_cholesky_factors(monkeypatch: pytest.MonkeyPatch, size: int, block: int):
    monkeypatch.setattr(factors, "BLOCK", block)
    matrix_EAA = matrices(size)
    inverse_EAA, solved_E = inverse_cholesky(matrix_EAA.clone())
    assert solved_E.tolist() == [True] * 3
    assert torch.equal(inverse_EAA, inverse_EAA.tril())
    torch.testing.assert_close(inverse_EAA, torch.linalg.cholesky(matrix_EAA).inverse())


@pytest.mark.parametrize("damping", [1e-2, 1e-5])
def test_float32_is_as_accurate_as_two_factorizations(monkeypatch: pytest.MonkeyPatch, damping: float):
    """The usual way, in float32 too: factorize, invert, factorize the inverse."""
    monkeypatch.setattr(factors, "BLOCK", 64)
    matrix_EAA = matrices(300, damping, spread=3.0)
    exact_EAA = torch.linalg.cholesky(matrix_EAA.inverse(), upper=True)
    twice_EAA = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(matrix_EAA.float())), upper=True
    ).double()
    once_EAA, _ = inverse_factor(matrix_EAA.float())

    def error(found_EAA: Tensor) -> float:
        return float((found_EAA - exact_EAA).norm() / exact_EAA.norm())

    assert error(once_EAA.double()) < 1.1 * error(twice_EAA)


def test_matrices_without_a_factor_are_named(monkeypatch: pytest.MonkeyPatch):
    """And those beside them are factorized as before."""
    monkeypatch.setattr(factors, "BLOCK", 16)
    matrix_EAA = matrices(40)
    expected_EAA, _ = inverse_factor(matrix_EAA.clone())
    # in the last block of the reversed matrix, in the first one, and in all of them
    for broken in ((0, 0), (39, 39)):
        spoiled_EAA = matrix_EAA.clone()
        spoiled_EAA[1, *broken] = -1.0
        factor_EAA, solved_E = inverse_factor(spoiled_EAA)
        assert solved_E.tolist() == [True, False, True]
        assert torch.equal(factor_EAA[::2], expected_EAA[::2])
    matrix_EAA[1] = torch.nan
    assert inverse_factor(matrix_EAA.clone())[1].tolist() == [True, False, True]
    matrix_EAA[1] = 0.0
    assert inverse_factor(matrix_EAA.clone())[1].tolist() == [True, False, True]
