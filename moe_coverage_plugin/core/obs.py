"""Optimal Brain Surgeon over the channels of one expert (``obs``): scores for pruning with reconstruction.

:mod:`~moe_coverage_plugin.core.reconstruction` refits the kept columns of ``down_proj`` when channels are removed. The
cost of removing a channel is then the part of it that the other channels cannot replace, and this part grows as more
of them are removed. For an expert with ``down_proj`` columns ``w_c``, over its ``n`` routed tokens with routing
weights ``g``, activations ``A`` and gradients ``d_t = dNLL/dA_t``:

    G = 1/n sum_t g_t^2 A_t A_t^T + ridge * mean(diagonal) * identity
    D = sum_t d_t d_t^T

If channel ``c`` is removed and the others are refitted by least squares under ``G``, the output changes by
``w_c r_tc``, where ``r`` is the residual of ``A_c`` on the others. The Fisher estimate of the rise of the loss is
``sum_t d_tc^2 r_tc^2``, up to one constant for the whole model. With gradients and residuals taken as independent over
tokens (a Kronecker factorisation) it becomes

    cost_c = D_cc / [G^-1]_cc.

Channels are removed one by one, the cheapest first. With ``t = G^-1[:, c] / [G^-1]_cc`` the removal of ``c`` turns
columns ``w_j`` into ``w_j - w_c t_j``, hence

    D <- D - t D_c: - D_:c t^T + D_cc t t^T,    G^-1 <- G^-1 - G^-1[:, c] t^T.

The score of a channel is its cost at its removal, and at least the score of the channel removed before it. The order
of scores is therefore the order of removal, and any planner keeps the channels that this algorithm would keep.

Tokens whose activations are all zero are left out of ``D``: their residual is zero, so ``d`` is not independent of it.

``G`` is collected layer by layer, ``D`` is estimated from sums that are small (:func:`pooled_curvature`).

``d`` already contains the routing weight, so ``g^2`` in ``G`` counts it a second time: scores are the rise of the loss
times a squared routing weight. ``G`` has this factor because the fit weighs tokens by it; without it the loss was
higher wherever both were measured (``benchmarks/TRIED.md``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.core.factors import inverse_factor
from moe_coverage_plugin.core.reconstruction import RIDGE

# least relative increase of the score from one removed channel to the next
STEP = 1e-9
# channels that are removed before their updates are applied to the matrices, by one product instead of one for each
PENDING = 32


def pooled_curvature(down_HI: Tensor, output_HH: Tensor, diagonal_I: Tensor) -> Tensor:
    """Estimate ``D`` of one expert from what all experts of a layer share, ``[I, I]`` float32 or wider.

    ``D`` of every expert would take ``E * I * I`` numbers for each layer until the backward pass ends. As
    ``d_t = W^T dNLL/dz_t``, it is ``W^T Q_e W`` with the second moments ``Q_e`` of the expert's output gradients. The
    experts of a layer write into one residual stream, so ``Q_e`` is estimated by the sum ``Q`` over all of them, and
    the estimate is scaled to the diagonal of ``D``, which is known.

    Args:
        down_HI: ``down_proj`` of the expert.
        output_HH: ``Q``, the sum of ``dNLL/dz_t dNLL/dz_t^T`` over the tokens of all experts of the layer.
        diagonal_I: ``sum_t d_t^2`` of the expert.
    """
    dtype = torch.promote_types(down_HI.dtype, torch.float32)
    down_HI = down_HI.detach().to(dtype)
    pooled_II = down_HI.T @ output_HH.to(down_HI) @ down_HI
    scale_I = torch.where(pooled_II.diagonal() > 0, diagonal_I.to(pooled_II) / pooled_II.diagonal(), 0.0).sqrt()
    return scale_I[:, None] * pooled_II * scale_I


@torch.no_grad()
def obs_scores(gram_EII: Tensor, curvature_EII: Tensor, ridge: float = RIDGE) -> Tensor:
    """Cost of each channel at its removal (module docstring), for all experts of a layer together.

    Takes ``I`` steps, on the device of ``gram_EII``. A step computes the diagonals and one row of two float64 matrices
    ``[E, I, I]``; the matrices themselves are updated after every ``PENDING`` steps.

    Args:
        gram_EII: ``G`` without the ridge.
        curvature_EII: ``D``, exact or :func:`pooled_curvature`.
        ridge: relative to the mean of the diagonal of ``G``.

    Returns:
        ``scores_EI`` float64, at least 0. Experts without activations score zero. NaN in the curvature of an expert
        becomes NaN in its scores, which planners check.
    """
    assert gram_EII.shape == curvature_EII.shape
    curvature = _Updated(curvature_EII.to(gram_EII.device, torch.float64, copy=True))
    inverse_EII, active_E = _inverse(gram_EII.to(torch.float64, copy=True), ridge)
    inverse = _Updated(inverse_EII)
    scores_EI = torch.zeros_like(inverse_EII[:, 0])
    removed_EI = torch.zeros_like(scores_EI, dtype=torch.bool)
    last_E1 = scores_EI[:, :1]
    for _ in range(scores_EI.shape[1]):
        cost_EI = (curvature.diagonal_EI / inverse.diagonal_EI).masked_fill(removed_EI, torch.inf)
        cost_E1, channel_E1 = cost_EI.min(-1, keepdim=True)
        # the maximum also lifts a zero that rounding made negative
        last_E1 = torch.maximum(cost_E1, last_E1 * (1 + STEP))
        scores_EI.scatter_(1, channel_E1, last_E1)
        removed_EI.scatter_(1, channel_E1, True)
        _remove_channel(inverse, curvature, channel_E1)
    return torch.where(active_E[:, None], scores_EI, 0.0)


class _Updated:
    """Symmetric matrices of all experts, from which products of vectors are subtracted.

    Attributes:
        diagonal_EI: diagonals after all updates.
    """

    def __init__(self, matrix_EII: Tensor) -> None:
        self.diagonal_EI = _diagonal(matrix_EII).clone()
        self._matrix_EII = matrix_EII
        experts, channels, _ = matrix_EII.shape
        self._experts_E = torch.arange(experts, device=matrix_EII.device)
        # updates that the matrices do not contain yet
        self._left_EUI, self._right_EUI = matrix_EII.new_empty(2, experts, 2 * PENDING, channels)
        self._pending = 0

    def row(self, channel_E: Tensor) -> Tensor:
        """One row of each matrix after all updates, ``[E, I]``."""
        row_E1I = self._matrix_EII[self._experts_E, channel_E][:, None]
        if self._pending:
            left_EU = self._left_EUI[self._experts_E, : self._pending, channel_E]
            row_E1I.baddbmm_(left_EU[:, None], self._right_EUI[:, : self._pending], alpha=-1)
        return row_E1I[:, 0]

    def subtract(self, *products: tuple[Tensor, Tensor]) -> None:
        """Subtract ``left^T right`` for each pair of vectors ``[E, I]``; their sum is symmetric."""
        for left_EI, right_EI in products:
            self.diagonal_EI.addcmul_(left_EI, right_EI, value=-1)
            self._left_EUI[:, self._pending] = left_EI
            self._right_EUI[:, self._pending] = right_EI
            self._pending += 1
        if self._pending > self._left_EUI.shape[1] - len(products):
            left_EUI, right_EUI = self._left_EUI[:, : self._pending], self._right_EUI[:, : self._pending]
            self._matrix_EII.baddbmm_(left_EUI.mT, right_EUI, alpha=-1)
            self._pending = 0


def _inverse(gram_EII: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Inverses with the ridge, and which experts have activations; the others get the identity.

    ``gram_EII`` is changed, because a copy of it would be the largest tensor of all.
    """
    scale_E = _diagonal(gram_EII).mean(-1)
    active_E = scale_E > 0
    _diagonal(gram_EII).add_((ridge * scale_E)[:, None])
    gram_EII[~active_E] = torch.eye(gram_EII.shape[-1], dtype=gram_EII.dtype, device=gram_EII.device)
    # on a GPU, cholesky_inverse would take one matrix after the other
    factor_EII, solved_E = inverse_factor(gram_EII)
    if not bool(solved_E.all()):
        raise torch.linalg.LinAlgError(  # pyright: ignore[reportPrivateImportUsage] - a documented name
            "a Gram matrix with its ridge is not positive definite"
        )
    return factor_EII.mT @ factor_EII, active_E


def _remove_channel(inverse: _Updated, curvature: _Updated, channel_E1: Tensor) -> None:
    """Remove one channel of every expert from both matrices; the others are refitted."""
    inverse_EI = inverse.row(channel_E1[:, 0])
    transfer_EI = inverse_EI / inverse_EI.gather(1, channel_E1)
    curvature_EI = curvature.row(channel_E1[:, 0])
    # half of t D_c: + D_:c t^T - D_cc t t^T; the other half is its transpose
    half_EI = curvature_EI - curvature_EI.gather(1, channel_E1) / 2 * transfer_EI
    curvature.subtract((transfer_EI, half_EI), (half_EI, transfer_EI))
    inverse.subtract((inverse_EI, transfer_EI))


def _diagonal(matrix_EII: Tensor) -> Tensor:
    return matrix_EII.diagonal(dim1=1, dim2=2)
