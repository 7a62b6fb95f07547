"""Refit of all projections of a pruned expert: Gauss-Newton for ``gate_proj`` and ``up_proj``, then ``down_proj``.

Least squares over ``down_proj`` (:mod:`~moe_coverage_plugin.core.reconstruction`) can only combine the kept channels.
Here the channels themselves are fitted too. With ``h = V x`` for the rows ``V`` of ``gate_proj`` and ``up_proj`` that
are kept, ``A = act(h)`` and the output ``z`` of the unpruned expert, over tokens with routing weights ``g``:

    min_V  sum_t g_t^2 ||z_t - W' act(V x_t)||^2.

One Gauss-Newton step linearises ``act`` at the present ``V``, and solves for the change ``X`` by a few steps of
conjugate gradients on

    (J^T J + mu I) X = J^T r,    J X = g W' act'(h) (X x),    r = g (z - W' act(h)).

Few steps regularise, as ``mu`` does. The change is taken by a quarter, by half or in full, as tokens that were held
back choose (:func:`~moe_coverage_plugin.core.reconstruction.nearest_fit`), and not at all if their error is not lower
for it. The columns of ``down_proj`` are then solved for again, with a ridge that the held-back tokens choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.reconstruction import RIDGES, nearest_fit

STEPS = 8
# mu, relative to the mean of the diagonal of J^T J
DAMPING = 1e-2
LENGTHS = (0.25, 0.5, 1.0)
# fewer tokens than this, on either side, say too little about an expert
FEWEST_TOKENS = 8

# from the outputs of gate_proj and up_proj, side by side ``[M, 2N]`` (or of up_proj alone, ``[M, N]``), to ``[M, N]``;
# element by element
Activation = Callable[[Tensor], Tensor]


class Tokens(NamedTuple):
    """Tokens that are routed to one expert.

    Attributes:
        x_MH: inputs of the expert.
        weight_M: routing weights.
        held_M: bool, tokens that are held back.
    """

    x_MH: Tensor
    weight_M: Tensor
    held_M: Tensor


class Refit(NamedTuple):
    """Refitted weights of the kept channels.

    Attributes:
        rows: of ``gate_proj`` and ``up_proj`` ``[N, H]``, or of ``up_proj`` alone.
        down_HN: columns of ``down_proj``.
    """

    rows: list[Tensor]
    down_HN: Tensor


class _Problem(NamedTuple):
    """Weighted tokens and targets, in the dtype of the fit."""

    x_MH: Tensor
    weight_M1: Tensor
    target_MH: Tensor

    def of(self, rows_M: Tensor) -> _Problem:
        return _Problem(self.x_MH[rows_M], self.weight_M1[rows_M], self.target_MH[rows_M])


def refit_expert(
    rows: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    down_HN: Tensor,
    target_MH: Tensor,
    tokens: Tokens,
    act: Activation,
) -> Refit | None:
    """Refit the kept channels of one expert (module docstring).

    Args:
        rows: kept rows of ``gate_proj`` and ``up_proj``, ``[N, H]``, or of ``up_proj`` alone.
        biases: of ``rows``, ``[N]`` each or ``None``; they are unchanged.
        down_HN: kept columns of ``down_proj``, already fitted.
        target_MH: outputs of the unpruned expert for ``tokens``, without the bias of ``down_proj``.
        tokens: of the expert.
        act: activation function.

    Returns:
        Weights in the dtype of ``rows``; ``None`` if the error on held-back tokens does not improve.
    """
    held_M = tokens.held_M
    if min(int(held_M.sum()), int((~held_M).sum())) < FEWEST_TOKENS:
        return None
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    every = _Problem(tokens.x_MH.to(dtype), tokens.weight_M.to(dtype)[:, None], target_MH.to(dtype))
    fitted, held = every.of(~held_M), every.of(held_M)
    channels = len(rows[0])
    rows_OH = torch.cat([each.detach().to(dtype) for each in rows])
    bias_O = torch.cat([rows_OH.new_zeros(channels) if each is None else each.detach().to(dtype) for each in biases])
    columns_HN = down_HN.detach().to(dtype)

    def error(problem: _Problem, rows_OH: Tensor, columns_HN: Tensor) -> float:
        output_MH = act(problem.x_MH @ rows_OH.T + bias_O) @ columns_HN.T
        return float((problem.weight_M1 * (output_MH - problem.target_MH)).square().sum(dtype=torch.float64))

    step_OH = _gauss_newton_step(fitted, rows_OH, bias_O, columns_HN, act)
    before = error(held, rows_OH, columns_HN)
    length = nearest_fit({each: before - error(held, rows_OH + each * step_OH, columns_HN) for each in LENGTHS})
    if length is None:
        return None
    rows_OH = rows_OH + length * step_OH
    a_MN = act(every.x_MH @ rows_OH.T + bias_O)
    columns_HN = _solve_down(every, a_MN, held_M, columns_HN)
    return Refit(
        [each.to(old.dtype) for each, old in zip(rows_OH.split(channels), rows, strict=True)],
        columns_HN.to(down_HN.dtype),
    )


def _gauss_newton_step(
    problem: _Problem, rows_OH: Tensor, bias_O: Tensor, columns_HN: Tensor, act: Activation
) -> Tensor:
    """The change of ``rows_OH`` by :data:`STEPS` steps of conjugate gradients."""
    x_MH, weight_M1, target_MH = problem
    h_MO = x_MH @ rows_OH.T + bias_O
    a_MN, slope_MO = _slopes(act, h_MO)
    parts = h_MO.shape[1] // a_MN.shape[1]

    def forward(change_OH: Tensor) -> Tensor:
        change_MN = (slope_MO * (x_MH @ change_OH.T)).unflatten(1, (parts, -1)).sum(1)
        return weight_M1 * (change_MN @ columns_HN.T)

    def backward(rows_MH: Tensor) -> Tensor:
        gradient_MN = (weight_M1 * rows_MH) @ columns_HN
        return (slope_MO * gradient_MN.repeat(1, parts)).T @ x_MH

    residual_OH = backward(weight_M1 * (target_MH - a_MN @ columns_HN.T))
    norms_O = columns_HN.square().sum(0).repeat(parts)
    squares_M1 = weight_M1.square() * x_MH.square().mean(-1, keepdim=True)
    diagonal = ((squares_M1 * slope_MO.square()).sum(0) * norms_O).mean()
    change_OH, direction_OH = torch.zeros_like(residual_OH), residual_OH
    square = residual_OH.square().sum()
    for _ in range(STEPS):
        product_OH = backward(forward(direction_OH)) + DAMPING * diagonal * direction_OH
        curvature = (direction_OH * product_OH).sum()
        if not float(curvature) > 0.0:
            break
        change_OH = change_OH + square / curvature * direction_OH
        residual_OH = residual_OH - square / curvature * product_OH
        square, last = residual_OH.square().sum(), square
        direction_OH = residual_OH + square / last * direction_OH
    return change_OH


@torch.enable_grad()
def _slopes(act: Activation, h_MO: Tensor) -> tuple[Tensor, Tensor]:
    """The activation and its derivatives; each entry of ``h`` enters one entry of the activation."""
    h_MO = h_MO.detach().requires_grad_()
    a_MN = act(h_MO)
    (slope_MO,) = torch.autograd.grad(a_MN.sum(), h_MO)
    return a_MN.detach(), slope_MO


def _solve_down(problem: _Problem, a_MN: Tensor, held_M: Tensor, old_HN: Tensor) -> Tensor:
    """Columns by least squares with a ridge towards the old ones, chosen by held-back tokens."""
    a_MN = (problem.weight_M1 * a_MN).double()
    # the change of the columns is fitted to what the old ones leave
    left_MH = (problem.weight_M1 * problem.target_MH).double() - a_MN @ old_HN.double().T
    held_NN, held_NH = a_MN[held_M].T @ a_MN[held_M], a_MN[held_M].T @ left_MH[held_M]
    fitted_NN, fitted_NH = a_MN[~held_M].T @ a_MN[~held_M], a_MN[~held_M].T @ left_MH[~held_M]

    gains = {}
    for ridge in reversed(RIDGES[:-1]):
        change_NH = _ridge_solution(fitted_NN, fitted_NH, ridge)
        gains[ridge] = float((change_NH * (2 * held_NH - held_NN @ change_NH)).sum())
    best = nearest_fit(gains)
    if best is None:
        return old_HN
    change_NH = _ridge_solution(fitted_NN + held_NN, fitted_NH + held_NH, best)
    return (old_HN.double() + change_NH.T).to(old_HN.dtype)


def _ridge_solution(gram_NN: Tensor, products_NH: Tensor, ridge: float) -> Tensor:
    regular_NN = gram_NN.clone()
    regular_NN.diagonal().add_(ridge * gram_NN.diagonal().mean().clamp(min=torch.finfo(gram_NN.dtype).tiny))
    return torch.cholesky_solve(products_NH, torch.linalg.cholesky(regular_NN))
