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

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.gauss_newton import (
    Activation,
    Factors,
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


class Equations(NamedTuple):
    """What columns of ``down_proj`` are fitted to: sums in float64 over the tokens to fit, then over those held back.

    Attributes:
        grams_2ENN: of the activations of the kept channels.
        left_2ENH: their products with what the old columns leave of the target.
    """

    grams_2ENN: Tensor
    left_2ENH: Tensor


class RefittedRows(NamedTuple):
    """Refitted rows of the kept channels.

    Attributes:
        rows_EOH: of ``gate_proj`` and ``up_proj``, or of ``up_proj`` alone.
        better_E: experts whose error on held-back tokens is lower with them; rows of others are the old ones.
        equations: for columns that fit these rows.
    """

    rows_EOH: Tensor
    better_E: Tensor
    equations: Equations


@torch.no_grad()
def refit_rows(weights: Weights, inverse: Factors, fitted: Problem, held: Problem, act: Activation) -> RefittedRows:
    """Refit the rows of the kept channels of experts of one width (module docstring).

    Args:
        weights: the kept weights.
        inverse: :func:`inverse_factors` of these experts.
        fitted: the tokens to fit.
        held: the tokens held back.
        act: activation function.

    Returns:
        Rows in their dtype.
    """
    dtype = weights.wide_dtype
    fitted_rows, held_rows = (Rows.of(each, dtype) for each in (fitted, held))
    changes = gauss_newton_steps(fitted_rows, weights, inverse, act)
    rounded = fitted.tokens.x_EMH.dtype in SIXTEEN_BITS
    with tf32_products(rounded):
        fit_E, better_E = _best_change(held_rows, weights, changes, act)
        better_E = better_E & (torch.minimum(fitted.tokens.count_E, held.tokens.count_E) >= FEWEST_TOKENS)
        # columns are fitted to the rows as they are stored
        new_EOH = (weights.rows_EOH + _chosen(changes, fit_E)).to(weights.rows_EOH.dtype)
        new_EOH = new_EOH.where(better_E[:, None, None], weights.rows_EOH)
        sums = [
            _sums(each, act(activation_inputs(each.x_EMH, new_EOH, weights.bias_EO)), weights.down_EHN, rounded)
            for each in (fitted_rows, held_rows)
        ]
    return RefittedRows(new_EOH, better_E, Equations(*map(torch.stack, zip(*sums, strict=True))))


@torch.no_grad()
def refit_down(down_EHN: Tensor, equations: Sequence[Equations]) -> Tensor:
    """Columns by least squares with a ridge towards the old ones, chosen by held-back tokens.

    Args:
        down_EHN: the old columns.
        equations: of these experts, in parts.

    Returns:
        In the dtype of ``down_EHN``.
    """
    (fitted_ENN, held_ENN), (fitted_ENH, held_ENH) = (torch.cat(parts, 1) for parts in zip(*equations, strict=True))
    ridge_E = best_ridge(fitted_ENN, held_ENN, fitted_ENH @ fitted_ENH.mT, fitted_ENH @ held_ENH.mT)
    better_E = ridge_E.isfinite()
    inverse_1ENN, solved_1E = inverse_with_ridge(fitted_ENN + held_ENN, ridge_E.where(better_E, 1.0)[None])
    change_EHN = (fitted_ENH + held_ENH).mT @ inverse_1ENN[0]
    new_EHN = (down_EHN.double() + change_EHN).to(down_EHN.dtype)
    return new_EHN.where((better_E & solved_1E[0])[:, None, None], down_EHN)


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


def _sums(problem: Rows, a_EMN: Tensor, down_EHN: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    """:class:`Equations` of one side of the tokens, summed in float32 if they are in 16 bits, else in float64."""
    dtype = problem.target_EMH.dtype if rounded else torch.float64
    a_EMN = (problem.weight_EM1 * a_EMN).to(dtype)
    # the change of the columns is fitted to it
    left_EMH = (problem.weight_EM1 * problem.target_EMH).to(dtype)
    left_EMH.baddbmm_(a_EMN, down_EHN.to(dtype).mT, alpha=-1)
    return (a_EMN.mT @ a_EMN).double(), (a_EMN.mT @ left_EMH).double()
