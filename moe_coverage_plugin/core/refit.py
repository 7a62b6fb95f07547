"""Refit of all projections of a pruned expert: Gauss-Newton for ``gate_proj`` and ``up_proj``, then ``down_proj``.

Least squares over ``down_proj`` (:mod:`~moe_coverage_plugin.core.reconstruction`) can only combine the kept channels.
Here the channels themselves are fitted too. With ``h = V x`` for the rows ``V`` of ``gate_proj`` and ``up_proj`` that
are kept, ``A = act(h)`` and the output ``z`` of the unpruned expert, over tokens with routing weights ``g``:

    min_V  sum_t g_t^2 ||z_t - W' act(V x_t)||^2.

One Gauss-Newton step linearises ``act`` at the present ``V``, and solves for the change ``X`` by a few steps of
conjugate gradients on

    (J^T J + mu I) X = J^T r,    J X = g W' act'(h) (X x),    r = g (z - W' act(h)).

Few steps regularise, as ``mu`` does. The change is taken by a quarter, by half or in full, as tokens that were held
back choose (:func:`~moe_coverage_plugin.core.reconstruction.best_fit`), and not at all if their error is not lower
for it. The columns of ``down_proj`` are then solved for again, with a ridge that the held-back tokens choose.

Experts of one width are fitted together. On a GPU the step is computed in TF32: an inexact direction costs little,
since what is taken of it is decided by errors in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.products import tf32_products
from moe_coverage_plugin.core.reconstruction import best_fit, best_ridge, inverse_with_ridge

STEPS = 8
# mu, relative to the mean of the diagonal of J^T J
DAMPING = 1e-2
LENGTHS = (0.25, 0.5, 1.0)
# fewer tokens than this, on either side, say too little about an expert
FEWEST_TOKENS = 8

# from the outputs of gate_proj and up_proj, side by side ``[..., 2N]`` (or of up_proj alone, ``[..., N]``), to
# ``[..., N]``; element by element
Activation = Callable[[Tensor], Tensor]


class Tokens(NamedTuple):
    """Tokens that are routed to some experts, which are all fitted or all held back.

    Attributes:
        x_EMH: inputs of the experts; rows behind an expert's own are zero.
        weight_EM: routing weights, zero for these rows.
        count_E: tokens of each expert, int64.
    """

    x_EMH: Tensor
    weight_EM: Tensor
    count_E: Tensor


class Refit(NamedTuple):
    """Refitted weights of the kept channels.

    Attributes:
        rows_EOH: of ``gate_proj`` and ``up_proj``, one below the other ``[E, 2N, H]``, or of ``up_proj`` alone.
        down_EHN: columns of ``down_proj``.
        better_E: experts whose error on held-back tokens is lower with them; weights of others mean nothing.
    """

    rows_EOH: Tensor
    down_EHN: Tensor
    better_E: Tensor


class Problem(NamedTuple):
    """Tokens and what the pruned expert should output for them.

    Attributes:
        tokens: of the experts.
        target_EMH: outputs of the unpruned experts, without the bias of ``down_proj``.
    """

    tokens: Tokens
    target_EMH: Tensor


class _Rows(NamedTuple):
    """A :class:`Problem` in the dtype of the fit."""

    x_EMH: Tensor
    weight_EM1: Tensor
    target_EMH: Tensor

    @classmethod
    def of(cls, problem: Problem, dtype: torch.dtype) -> _Rows:
        (x_EMH, weight_EM, _), target_EMH = problem
        return cls(x_EMH.to(dtype), weight_EM.to(dtype)[..., None], target_EMH.to(dtype))


@torch.no_grad()
def refit_experts(
    rows_EOH: Tensor, bias_EO: Tensor, down_EHN: Tensor, fitted: Problem, held: Problem, act: Activation
) -> Refit:
    """Refit the kept channels of experts of one width (module docstring).

    Args:
        rows_EOH: kept rows of ``gate_proj`` and ``up_proj``, one below the other, or of ``up_proj`` alone.
        bias_EO: of ``rows_EOH``, zero if there is none; it is unchanged.
        down_EHN: kept columns of ``down_proj``, already fitted.
        fitted: the tokens to fit.
        held: the tokens held back.
        act: activation function.

    Returns:
        Weights in the dtype of ``rows_EOH`` and ``down_EHN``.
    """
    dtype = torch.promote_types(rows_EOH.dtype, torch.float32)
    fitted_rows, held_rows = (_Rows.of(each, dtype) for each in (fitted, held))
    old_EOH, bias_EO, old_EHN = (each.detach().to(dtype) for each in (rows_EOH, bias_EO, down_EHN))

    def inputs(problem: _Rows, rows_EOH: Tensor) -> Tensor:
        return torch.baddbmm(bias_EO[:, None], problem.x_EMH, rows_EOH.mT)

    def error(h_EMO: Tensor) -> Tensor:
        left_EMH = act(h_EMO) @ old_EHN.mT - held_rows.target_EMH
        return (held_rows.weight_EM1 * left_EMH).square().sum((1, 2), dtype=torch.float64)

    with tf32_products():
        step_EOH = _gauss_newton_step(fitted_rows, old_EOH, bias_EO, old_EHN, act)
    # inputs of the activation are linear in the rows
    old_EMO, step_EMO = inputs(held_rows, old_EOH), held_rows.x_EMH @ step_EOH.mT
    before_E = error(old_EMO)
    gains = [before_E - error(torch.add(old_EMO, step_EMO, alpha=length)) for length in LENGTHS]
    fit_E, better_E = best_fit(torch.stack(gains))
    better_E = better_E & (torch.minimum(fitted.tokens.count_E, held.tokens.count_E) >= FEWEST_TOKENS)
    length_E = torch.tensor(LENGTHS, dtype=dtype, device=fit_E.device)[fit_E]
    new_EOH = torch.where(better_E[:, None, None], old_EOH + length_E[:, None, None] * step_EOH, old_EOH)
    new_EHN = _solve_down([(each, act(inputs(each, new_EOH))) for each in (fitted_rows, held_rows)], old_EHN)
    return Refit(new_EOH.to(rows_EOH.dtype), new_EHN.to(down_EHN.dtype), better_E)


def _gauss_newton_step(
    problem: _Rows, rows_EOH: Tensor, bias_EO: Tensor, columns_EHN: Tensor, act: Activation
) -> Tensor:
    """The change of ``rows_EOH`` by :data:`STEPS` steps of conjugate gradients."""
    x_EMH, weight_EM1, target_EMH = problem
    h_EMO = torch.baddbmm(bias_EO[:, None], x_EMH, rows_EOH.mT)
    a_EMN, slope_EMO = _slopes(act, h_EMO)
    del h_EMO
    parts = slope_EMO.shape[2] // a_EMN.shape[2]

    squared_EM1 = weight_EM1.square()
    # J^T J needs of the columns only this
    outputs_ENN = columns_EHN.mT @ columns_EHN

    def backward(gradient_EMN: Tensor) -> Tensor:
        gradient_EMUN = slope_EMO.unflatten(2, (parts, -1)) * (squared_EM1 * gradient_EMN)[:, :, None]
        return gradient_EMUN.flatten(2).mT @ x_EMH

    def normal(change_EOH: Tensor) -> Tensor:
        change_EMN = (slope_EMO * (x_EMH @ change_EOH.mT)).unflatten(2, (parts, -1)).sum(2)
        return backward(change_EMN @ outputs_ENN)

    def squares(values_EOH: Tensor) -> Tensor:
        return values_EOH.square().sum((1, 2), keepdim=True)

    residual_EOH = backward((target_EMH - a_EMN @ columns_EHN.mT) @ columns_EHN)
    norms_EO = columns_EHN.square().sum(1).repeat(1, parts)
    squares_EM1 = squared_EM1 * x_EMH.square().mean(-1, keepdim=True)
    diagonal_E11 = ((squares_EM1 * slope_EMO.square()).sum(1) * norms_EO).mean(1)[:, None, None]
    change_EOH, direction_EOH = torch.zeros_like(residual_EOH), residual_EOH
    square_E11 = squares(residual_EOH)
    going_E11 = torch.ones_like(square_E11, dtype=torch.bool)
    for _ in range(STEPS):
        product_EOH = normal(direction_EOH) + DAMPING * diagonal_E11 * direction_EOH
        curvature_E11 = (direction_EOH * product_EOH).sum((1, 2), keepdim=True)
        # an expert that arrived, or underflows, stays where it is
        going_E11 = going_E11 & (curvature_E11 > 0)
        length_E11 = (square_E11 / curvature_E11).where(going_E11, 0.0)
        change_EOH = change_EOH + length_E11 * direction_EOH
        residual_EOH = residual_EOH - length_E11 * product_EOH
        square_E11, last_E11 = squares(residual_EOH), square_E11
        direction_EOH = residual_EOH + (square_E11 / last_E11).where(last_E11 > 0, 0.0) * direction_EOH
    return change_EOH


@torch.enable_grad()
def _slopes(act: Activation, h_EMO: Tensor) -> tuple[Tensor, Tensor]:
    """The activation and its derivatives; each entry of ``h`` enters one entry of the activation."""
    h_EMO = h_EMO.detach().requires_grad_()
    a_EMN = act(h_EMO)
    (slope_EMO,) = torch.autograd.grad(a_EMN.sum(), h_EMO)
    return a_EMN.detach(), slope_EMO


def _solve_down(sides: list[tuple[_Rows, Tensor]], old_EHN: Tensor) -> Tensor:
    """Columns by least squares with a ridge towards the old ones, chosen by held-back tokens.

    Args:
        sides: the fitted tokens, then those held back, with the activations ``[E, M, N]``.
        old_EHN: the columns.
    """
    (fitted_ENN, fitted_ENH), (held_ENN, held_ENH) = (_normal_equations(*each, old_EHN) for each in sides)
    ridge_E = best_ridge(fitted_ENN, held_ENN, fitted_ENH @ fitted_ENH.mT, fitted_ENH @ held_ENH.mT)
    better_E = ridge_E.isfinite()
    inverse_1ENN, solved_1E = inverse_with_ridge(fitted_ENN + held_ENN, ridge_E.where(better_E, 1.0)[None])
    change_EHN = (fitted_ENH + held_ENH).mT @ inverse_1ENN[0]
    new_EHN = (old_EHN.double() + change_EHN).to(old_EHN.dtype)
    return new_EHN.where((better_E & solved_1E[0])[:, None, None], old_EHN)


def _normal_equations(problem: _Rows, a_EMN: Tensor, old_EHN: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices of the activations, and their products with what the old columns leave; in float64."""
    a_EMN = (problem.weight_EM1 * a_EMN).double()
    # the change of the columns is fitted to it
    left_EMH = (problem.weight_EM1 * problem.target_EMH).double() - a_EMN @ old_EHN.double().mT
    return a_EMN.mT @ a_EMN, a_EMN.mT @ left_EMH
