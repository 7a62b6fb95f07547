"""A Gauss-Newton step for ``gate_proj`` and ``up_proj`` of a pruned expert, by a few steps of conjugate gradients.

With ``h = V x`` for the rows ``V`` of ``gate_proj`` and ``up_proj`` that are kept, ``A = act(h)`` and the output ``z``
of the unpruned expert, over tokens with routing weights ``g``, the aim is

    min_V  sum_t g_t^2 ||z_t - W' act(V x_t)||^2.

The step linearises ``act`` at the present ``V``, and solves for the change ``X`` of

    (J^T J + mu I) X = J^T r,    J X = g W' act'(h) (X x),    r = g (z - W' act(h)).

Conjugate gradients are preconditioned by the inverse of a Kronecker product that is near ``J^T J`` (K-FAC, Martens and
Grosse, arXiv:1503.05671): of ``S = sum_t g_t^2 x_t x_t^T``, and of ``L``, which is ``W'^T W'`` times, element by
element, the mean product of the derivatives of two channels. Four steps reach what eight without it do.

On a GPU products are in TF32: an inexact direction costs little, since held-back tokens decide what is taken of it.
Operands of tokens in bfloat16, whose model rounds its activations to as few bits, are in bfloat16 except for the
outputs that are missing; sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.factors import inverse_cholesky
from moe_coverage_plugin.core.products import rounded_product, tf32_products, wide_product

STEPS = 4
# mu, relative to the mean of the diagonal of J^T J
DAMPING = 1e-2

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


class Weights(NamedTuple):
    """Kept weights of experts of one width.

    Attributes:
        rows_EOH: of ``gate_proj`` and ``up_proj``, one below the other ``[E, 2N, H]``, or of ``up_proj`` alone.
        bias_EO: of these rows, or ``None``; it is unchanged.
        down_EHN: columns of ``down_proj``, already fitted.
    """

    rows_EOH: Tensor
    bias_EO: Tensor | None
    down_EHN: Tensor

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of the fit."""
        return torch.promote_types(self.rows_EOH.dtype, torch.float32)


class Factors(NamedTuple):
    """Kronecker factors ``L`` and ``S``, or for each of them ``W`` with ``W^T W`` inverse to it.

    Attributes:
        left_EOO: for the rows.
        right_EHH: for the inputs.
    """

    left_EOO: Tensor
    right_EHH: Tensor


class Problem(NamedTuple):
    """Tokens and what the pruned expert should output for them.

    Attributes:
        tokens: of the experts.
        target_EMH: outputs of the unpruned experts, without the bias of ``down_proj``.
    """

    tokens: Tokens
    target_EMH: Tensor


class Rows(NamedTuple):
    """A :class:`Problem` in the dtype of the fit, except for inputs in bfloat16."""

    x_EMH: Tensor
    weight_EM1: Tensor
    target_EMH: Tensor

    @classmethod
    def of(cls, problem: Problem, dtype: torch.dtype) -> Rows:
        """Convert the tokens of a problem for a fit in ``dtype``."""
        (x_EMH, weight_EM, _), target_EMH = problem
        # not of inputs in float16, in which small gradients would underflow
        if (x_EMH.dtype, dtype) != (torch.bfloat16, torch.float32):
            x_EMH = x_EMH.to(dtype)
        return cls(x_EMH, weight_EM.to(dtype)[..., None], target_EMH.to(dtype))


@torch.no_grad()
def gauss_newton_steps(problem: Rows, weights: Weights, act: Activation) -> list[Tensor]:
    """The change of ``rows_EOH`` after each of :data:`STEPS` steps of conjugate gradients.

    Args:
        problem: the tokens to fit, and what the experts should output for them.
        weights: at which the activation is linearised.
        act: activation function.
    """
    x_EMH, weight_EM1, target_EMH = problem
    with tf32_products():
        linear, a_EMN = _linearised(x_EMH, weight_EM1, weights, act)
        factors = linear.factors(weight_EM1)
    # the diagonal of L is that of J^T J, averaged over the columns of X
    damping_E11 = DAMPING * factors.left_EOO.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    inverse = inverse_factors(factors, weight_EM1.count_nonzero(dim=(1, 2)))
    with tf32_products():
        # what is missing in the outputs, multiplied by the columns
        left_EMN = target_EMH @ weights.down_EHN.to(target_EMH.dtype)
        left_EMN.baddbmm_(a_EMN, linear.outputs_ENN, alpha=-1).mul_(weight_EM1)
        residual_EOH = linear.backward(left_EMN.to(x_EMH.dtype))
        del left_EMN, a_EMN
        return _conjugate_gradients(linear, residual_EOH, inverse, damping_E11)


def inverse_factors(factors: Factors, count_E: Tensor) -> Factors:
    """``W`` of ``L`` and ``S`` with ridges; the identity for a matrix that has no inverse.

    A ridge is the mean of the diagonal times the number of rows over that of tokens, about as large as the noise of a
    matrix of so few tokens: if these are too few, the factors change no direction. Products are in full precision,
    because rounding could make a matrix indefinite.

    Args:
        factors: ``L`` and ``S``, each up to a factor of its expert; their memory is used.
        count_E: numbers of tokens.
    """
    inverses = []
    for matrix_EAA in factors:
        diagonal_EA = matrix_EAA.diagonal(dim1=1, dim2=2)
        ridge_E = diagonal_EA.mean(1) * matrix_EAA.shape[-1] / count_E.clamp(min=1)
        diagonal_EA += ridge_E.where(ridge_E > 0, 1.0)[:, None]
        inverse_EAA, solved_E = inverse_cholesky(matrix_EAA)
        identity_AA = torch.eye(inverse_EAA.shape[-1], dtype=inverse_EAA.dtype, device=inverse_EAA.device)
        inverses.append(inverse_EAA.where(solved_E[:, None, None], identity_AA))
    return Factors(*inverses)


def _conjugate_gradients(linear: _Linear, residual_EOH: Tensor, inverse: Factors, damping_E11: Tensor) -> list[Tensor]:
    direction_EOH = _precondition(residual_EOH, inverse)
    square_E11 = _inner(residual_EOH, direction_EOH)
    changes, going_E11 = [torch.zeros_like(residual_EOH)], torch.ones_like(square_E11, dtype=torch.bool)
    for _ in range(STEPS):
        product_EOH = torch.addcmul(linear.normal(direction_EOH), damping_E11, direction_EOH)
        curvature_E11 = _inner(direction_EOH, product_EOH)
        # an expert that arrived, or underflows, stays where it is
        going_E11 = going_E11 & (curvature_E11 > 0)
        length_E11 = (square_E11 / curvature_E11).where(going_E11, 0.0)
        changes.append(torch.addcmul(changes[-1], length_E11, direction_EOH))
        residual_EOH = torch.addcmul(residual_EOH, length_E11, product_EOH, value=-1)
        preconditioned_EOH = _precondition(residual_EOH, inverse)
        square_E11, last_E11 = _inner(residual_EOH, preconditioned_EOH), square_E11
        ratio_E11 = (square_E11 / last_E11).where(last_E11 > 0, 0.0)
        direction_EOH = torch.addcmul(preconditioned_EOH, ratio_E11, direction_EOH)
    return changes[1:]


def _precondition(values_EOH: Tensor, inverse: Factors) -> Tensor:
    left_EOO, right_EHH = inverse
    return left_EOO.mT @ (left_EOO @ values_EOH @ right_EHH.mT) @ right_EHH


def _inner(one_EOH: Tensor, other_EOH: Tensor) -> Tensor:
    return (one_EOH * other_EOH).sum((1, 2), keepdim=True)


def activation_inputs(x_EMH: Tensor, rows_EOH: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Inputs ``[E, M, O]`` of the activation; exact products if both are in bfloat16, as in a model of that dtype."""
    h_EMO = wide_product(x_EMH, rows_EOH.mT)
    return h_EMO if bias_EO is None else h_EMO.add_(bias_EO[:, None])


class _Linear(NamedTuple):
    """The weighted outputs of experts as linear functions ``J`` of a change of their rows.

    Attributes:
        x_EMH: inputs, whose dtype is that of all operands.
        slope_EMO: derivatives of the activation, times the routing weights, in the same dtype.
        outputs_ENN: ``W'^T W'``, which is all that ``J^T J`` needs of the columns.
    """

    x_EMH: Tensor
    slope_EMO: Tensor
    outputs_ENN: Tensor

    @property
    def _projections(self) -> Tensor:
        """The slopes of each projection that is fitted: of two with a gate, otherwise of one."""
        return self.slope_EMO.unflatten(2, (-1, self.outputs_ENN.shape[1]))

    def backward(self, gradient_EMN: Tensor) -> Tensor:
        """``J^T`` times what has been multiplied by the columns, in the dtype of the operands."""
        gradient_EMUN = self._projections * gradient_EMN[:, :, None]
        return wide_product(gradient_EMUN.flatten(2).mT, self.x_EMH)

    def normal(self, change_EOH: Tensor) -> Tensor:
        """``J^T J`` times a change of the rows."""
        dtype = self.x_EMH.dtype
        h_EMUN = rounded_product(self.x_EMH, change_EOH.mT, dtype).view_as(self._projections)
        return self.backward(rounded_product(h_EMUN.mul_(self._projections).sum(2), self.outputs_ENN, dtype))

    def factors(self, weight_EM1: Tensor) -> Factors:
        """``L`` and ``S`` of the module docstring, each up to a factor of its expert, without ridges."""
        dtype, parts = self.x_EMH.dtype, self._projections.shape[2]
        wide, hidden = self.outputs_ENN.dtype, self.x_EMH.shape[-1]
        # root mean squares of the inputs
        norms_EM1 = torch.linalg.vector_norm(self.x_EMH, dim=-1, keepdim=True, dtype=wide) / hidden**0.5
        slope_EMO, x_EMH = _scaled(self.slope_EMO, norms_EM1, dtype), _scaled(self.x_EMH, weight_EM1, dtype)
        outputs_EOO = self.outputs_ENN.repeat(1, parts, parts)
        return Factors(wide_product(slope_EMO.mT, slope_EMO).mul_(outputs_EOO), wide_product(x_EMH.mT, x_EMH))


def _scaled(rows_EMA: Tensor, factor_EM1: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows times factors in a narrower dtype, without a wide copy."""
    return torch.mul(rows_EMA, factor_EM1, out=torch.empty_like(rows_EMA, dtype=dtype))


def _linearised(x_EMH: Tensor, weight_EM1: Tensor, weights: Weights, act: Activation) -> tuple[_Linear, Tensor]:
    """The linear functions at these weights, and the activations ``[E, M, N]``."""
    rows_EOH, bias_EO, columns_EHN = weights
    a_EMN, slope_EMO = _slopes(act, activation_inputs(x_EMH, rows_EOH, bias_EO))
    outputs_ENN = wide_product(columns_EHN.mT, columns_EHN)
    return _Linear(x_EMH, _scaled(slope_EMO, weight_EM1, x_EMH.dtype), outputs_ENN), a_EMN


@torch.enable_grad()
def _slopes(act: Activation, h_EMO: Tensor) -> tuple[Tensor, Tensor]:
    """The activation and its derivatives; each entry of ``h`` enters one entry of the activation."""
    h_EMO = h_EMO.detach().requires_grad_()
    a_EMN = act(h_EMO)
    (slope_EMO,) = torch.autograd.grad(a_EMN.sum(), h_EMO)
    return a_EMN.detach(), slope_EMO
