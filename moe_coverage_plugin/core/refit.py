"""Refit of all projections of a pruned expert: ``gate_proj`` and ``up_proj`` by a Gauss-Newton step, then the rest.

Least squares over ``down_proj`` (:mod:`~moe_coverage_plugin.core.reconstruction`) can only combine the kept channels.
Here the channels themselves are fitted too (:mod:`~moe_coverage_plugin.core.gauss_newton`). Few steps of conjugate
gradients regularise, as damping does, and how few are best depends on the number of tokens: tokens that were held back
choose after which step the change is taken, and whether by half or in full
(:func:`~moe_coverage_plugin.core.reconstruction.best_fit`), or not at all if their error is not lower for it. The
columns of ``down_proj`` are then solved for again, with a ridge that the held-back tokens choose.

Experts of one width are fitted together. Errors are computed in float32, columns in float64. Tokens in 16 bits have
lost more by rounding than TF32 loses: for them, both are computed in TF32 on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.gauss_newton import (
    Activation,
    Problem,
    Rows,
    Weights,
    activation_inputs,
    gauss_newton_steps,
)
from moe_coverage_plugin.core.products import SIXTEEN_BITS, tf32_products, wide_product
from moe_coverage_plugin.core.reconstruction import best_fit, best_ridge, inverse_with_ridge

LENGTHS = (0.5, 1.0)
# fewer tokens than this, on either side, say too little about an expert
FEWEST_TOKENS = 8


class Refit(NamedTuple):
    """Refitted weights of experts of one width.

    Attributes:
        rows_EOH: of ``gate_proj`` and ``up_proj``, or of ``up_proj`` alone.
        down_EHN: columns of ``down_proj``.
        better_E: experts whose error on held-back tokens is lower with new rows; the weights of others mean nothing.
    """

    rows_EOH: Tensor
    down_EHN: Tensor
    better_E: Tensor


@torch.no_grad()
def refit(weights: Weights, fitted: Problem, held: Problem, act: Activation) -> Refit:
    """Refit the kept channels of experts of one width (module docstring).

    Args:
        weights: the kept weights.
        fitted: the tokens to fit.
        held: the tokens held back.
        act: activation function.

    Returns:
        Weights in their dtypes.
    """
    sides = [Rows.of(each, weights.wide_dtype) for each in (fitted, held)]
    changes = gauss_newton_steps(sides[0], weights, act)
    rounded = fitted.tokens.x_EMH.dtype in SIXTEEN_BITS
    with tf32_products(rounded):
        fit_E, better_E = _best_change(sides[1], weights, changes, act)
        better_E = better_E & (torch.minimum(fitted.tokens.count_E, held.tokens.count_E) >= FEWEST_TOKENS)
        # columns are fitted to the rows as they are stored
        new_EOH = (weights.rows_EOH + _chosen(changes, fit_E)).to(weights.rows_EOH.dtype)
        del changes
        sums = [
            _Sums.of(each, act(activation_inputs(each.x_EMH, new_EOH, weights.bias_EO)), rounded) for each in sides
        ]
    return Refit(new_EOH, _refit_down(weights.down_EHN, *sums), better_E)


def token_bytes(hidden: int, channels: int, dtype: torch.dtype) -> int:
    """Memory that :func:`refit` takes for a token of an expert, with its input and its target.

    Args:
        hidden: size of hidden states.
        channels: at least the number of kept ones.
        dtype: of the tokens.
    """
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return (wide + 2 * dtype.itemsize) * hidden + 6 * wide * channels


def _best_change(held: Rows, weights: Weights, changes: list[Tensor], act: Activation) -> tuple[Tensor, Tensor]:
    """The change and its length that lower the error on held-back tokens most (:func:`best_fit`).

    Returns:
        ``[E]``: the index among all lengths of the first change, then of the second, and so on; and whether the error
        is lower with it.
    """
    down_EHN = weights.down_EHN.to(held.target_EMH.dtype)

    def error(h_EMO: Tensor) -> Tensor:
        left_EMH = torch.baddbmm(held.target_EMH, act(h_EMO), down_EHN.mT, beta=-1)
        norms_EM1 = torch.linalg.vector_norm(left_EMH, dim=-1, keepdim=True)
        return (held.weight_EM1 * norms_EM1).square().sum((1, 2), dtype=torch.float64)

    old_EMO = activation_inputs(held.x_EMH, weights.rows_EOH, weights.bias_EO)
    before_E, gains = error(old_EMO), []
    for change_EOH in changes:
        # inputs of the activation are linear in the rows
        change_EMO = wide_product(held.x_EMH, change_EOH.to(held.x_EMH.dtype).mT)
        gains += [before_E - error(torch.add(old_EMO, change_EMO, alpha=length)) for length in LENGTHS]
    return best_fit(torch.stack(gains))


def _chosen(changes: list[Tensor], fit_E: Tensor) -> Tensor:
    """The change of each expert by the index of :func:`_best_change`."""
    length_E = changes[0].new_tensor(LENGTHS)[fit_E % len(LENGTHS)]
    experts_E = torch.arange(len(fit_E), device=fit_E.device)
    return length_E[:, None, None] * torch.stack(changes)[fit_E // len(LENGTHS), experts_E]


class _Sums(NamedTuple):
    """What columns of ``down_proj`` are fitted to: sums in float64 over the tokens of one side.

    Attributes:
        gram_ENN: of the activations of the kept channels.
        target_ENH: products of these and of the target.
    """

    gram_ENN: Tensor
    target_ENH: Tensor

    @classmethod
    def of(cls, problem: Rows, a_EMN: Tensor, rounded: bool) -> _Sums:
        """Sum in float32 over tokens in 16 bits, and in float64 over others."""
        dtype = problem.target_EMH.dtype if rounded else torch.float64
        weight_EM1, target_EMH = problem.weight_EM1.to(dtype), problem.target_EMH.to(dtype)
        a_EMN = weight_EM1 * a_EMN
        gram_ENN = a_EMN.mT @ a_EMN
        return cls(gram_ENN.double(), ((weight_EM1 * a_EMN).mT @ target_EMH).double())

    def left(self, down_EHN: Tensor) -> Tensor:
        """Products ``[E, N, H]`` of the activations and of what these columns leave of the target."""
        return torch.baddbmm(self.target_ENH, self.gram_ENN, down_EHN.double().mT, alpha=-1)


def _refit_down(down_EHN: Tensor, fitted: _Sums, held: _Sums) -> Tensor:
    """Columns by least squares with a ridge towards the old ones, chosen by held-back tokens."""
    fitted_ENH, held_ENH = fitted.left(down_EHN), held.left(down_EHN)
    ridge_E = best_ridge(fitted.gram_ENN, held.gram_ENN, fitted_ENH @ fitted_ENH.mT, fitted_ENH @ held_ENH.mT)
    better_E = ridge_E.isfinite()
    inverse_1ENN, solved_1E = inverse_with_ridge(fitted.gram_ENN + held.gram_ENN, ridge_E.where(better_E, 1.0)[None])
    change_EHN = (fitted_ENH + held_ENH).mT @ inverse_1ENN[0]
    new_EHN = (down_EHN.double() + change_EHN).to(down_EHN.dtype)
    return new_EHN.where((better_E & solved_1E[0])[:, None, None], down_EHN)
