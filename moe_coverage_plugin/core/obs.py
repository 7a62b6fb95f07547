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
from moe_coverage_plugin.core.replays import Replays

# least relative increase of the score from one removed channel to the next
STEP = 1e-9
# channels that are removed before their updates are applied to the matrices, by one product instead of one for each
PENDING = 32


def pooled_curvature(down_EHI: Tensor, output_HH: Tensor, diagonal_EI: Tensor) -> Tensor:
    """Estimate ``D`` of experts from what all experts of a layer share, ``[E, I, I]`` float32 or wider.

    ``D`` of every expert would take ``E * I * I`` numbers for each layer until the backward pass ends. As
    ``d_t = W^T dNLL/dz_t``, it is ``W^T Q_e W`` with the second moments ``Q_e`` of the expert's output gradients. The
    experts of a layer write into one residual stream, so ``Q_e`` is estimated by the sum ``Q`` over all of them, and
    the estimate is scaled to the diagonal of ``D``, which is known.

    Args:
        down_EHI: ``down_proj`` of each expert.
        output_HH: ``Q``, the sum of ``dNLL/dz_t dNLL/dz_t^T`` over the tokens of all experts of the layer.
        diagonal_EI: ``sum_t d_t^2`` of each expert.
    """
    dtype = torch.promote_types(down_EHI.dtype, torch.float32)
    down_EHI = down_EHI.detach().to(dtype)
    pooled_EII = down_EHI.mT @ (output_HH.to(down_EHI) @ down_EHI)
    pooled_EI = _diagonal(pooled_EII)
    scale_EI = torch.where(pooled_EI > 0, diagonal_EI.to(pooled_EI) / pooled_EI, 0.0).sqrt()
    return scale_EI[:, :, None] * pooled_EII * scale_EI[:, None]


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
    channels = gram_EII.shape[-1]
    curvature_EII = curvature_EII.to(gram_EII.device, torch.float64, copy=True)
    inverse_EII, active_E = _inverse(gram_EII.to(torch.float64, copy=True), ridge)
    removal = _Removal(inverse_EII, curvature_EII)
    costs, removed = [], []
    with Replays(lambda: removal.remove(PENDING), inverse_EII.device) as removes:
        for start in range(0, channels, PENDING):
            count = min(PENDING, channels - start)
            if count == PENDING:
                removes()
            else:
                removal.remove(count)
            costs.append(removal.costs_UE[:count].clone())
            removed.append(removal.channels_UE[:count].clone())
    scores_IE = _increasing(torch.cat(costs))
    scores_EI = torch.zeros_like(inverse_EII[:, 0]).scatter_(1, torch.cat(removed).T, scores_IE.T)
    return torch.where(active_E[:, None], scores_EI, 0.0)


class _Removal:
    """Removes channels of all experts one by one, and keeps the other channels' matrices up to date.

    With the row ``n`` of the inverse and the transfer ``t`` of a removed channel, updates are written as

        G^-1 <- G^-1 - n t^T,    D <- D - (t h^T + h t^T),    h = D_c: - D_cc t / 2.

    Attributes:
        costs_UE: costs of the channels that the last call of :meth:`remove` removed, in their order.
        channels_UE: their indices.
    """

    def __init__(self, inverse_EII: Tensor, curvature_EII: Tensor):
        """Take over the matrices."""
        experts, channels, _ = inverse_EII.shape
        self._inverse_EII, self._curvature_EII = inverse_EII, curvature_EII
        self._inverse_EI, self._curvature_EI = (_diagonal(each).clone() for each in (inverse_EII, curvature_EII))
        self._removed_EI = torch.zeros_like(self._inverse_EI, dtype=torch.bool)
        self._experts_E = torch.arange(experts, device=inverse_EII.device)
        self.costs_UE = inverse_EII.new_empty(PENDING, experts)
        self.channels_UE = torch.empty_like(self.costs_UE, dtype=torch.int64)
        # n, t and h of updates that the matrices do not contain yet
        self._n_EUI, self._t_EUI, self._h_EUI = inverse_EII.new_empty(3, experts, PENDING, channels)

    def remove(self, channels: int) -> None:
        """Remove this many channels of every expert, at most ``PENDING``."""
        for step in range(channels):
            cost_EI = (self._curvature_EI / self._inverse_EI).masked_fill_(self._removed_EI, torch.inf)
            channel_E = self.channels_UE[step]
            torch.min(cost_EI, dim=1, out=(self.costs_UE[step], channel_E))
            self._removed_EI.scatter_(1, channel_E[:, None], True)
            self._add_update(step, channel_E)
        n_EUI, t_EUI, h_EUI = (each[:, :channels] for each in (self._n_EUI, self._t_EUI, self._h_EUI))
        self._inverse_EII.baddbmm_(n_EUI.mT, t_EUI, alpha=-1)
        self._curvature_EII.baddbmm_(t_EUI.mT, h_EUI, alpha=-1).baddbmm_(h_EUI.mT, t_EUI, alpha=-1)

    def _add_update(self, step: int, channel_E: Tensor) -> None:
        """Compute the update of a channel from its rows after all earlier updates, and apply it to the diagonals."""
        n_EUI, t_EUI, h_EUI = (each[:, :step] for each in (self._n_EUI, self._t_EUI, self._h_EUI))
        n_EI, t_EI, h_EI = (each[:, step] for each in (self._n_EUI, self._t_EUI, self._h_EUI))
        channel_E1 = channel_E[:, None]
        inverse_E1I = self._inverse_EII[self._experts_E, channel_E][:, None]
        # written here, because a copy would be one more kernel; the same below
        torch.baddbmm(inverse_E1I, self._at(n_EUI, channel_E), t_EUI, alpha=-1, out=n_EI[:, None])
        torch.div(n_EI, n_EI.gather(1, channel_E1), out=t_EI)
        self._inverse_EI.addcmul_(n_EI, t_EI, value=-1)
        curvature_E1I = self._curvature_EII[self._experts_E, channel_E][:, None]
        curvature_E1I.baddbmm_(self._at(t_EUI, channel_E), h_EUI, alpha=-1)
        curvature_EI = curvature_E1I.baddbmm_(self._at(h_EUI, channel_E), t_EUI, alpha=-1)[:, 0]
        torch.addcmul(curvature_EI, curvature_EI.gather(1, channel_E1), t_EI, value=-0.5, out=h_EI)
        self._curvature_EI.addcmul_(t_EI, h_EI, value=-2)

    def _at(self, vectors_EUI: Tensor, channel_E: Tensor) -> Tensor:
        """One entry of each vector, ``[E, 1, U]``."""
        return vectors_EUI[self._experts_E, :, channel_E][:, None]


def _increasing(costs_IE: Tensor) -> Tensor:
    """Scores in the order of removal: each is its cost, and at least ``1 + STEP`` times the score before it."""
    steps_I1 = torch.arange(len(costs_IE), dtype=costs_IE.dtype, device=costs_IE.device)[:, None]
    growth_I1 = (1 + STEP) ** steps_I1
    # the limit also lifts a zero that rounding made negative
    return (costs_IE / growth_I1).clamp(min=0).cummax(0).values * growth_I1


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


def _diagonal(matrix_EII: Tensor) -> Tensor:
    return matrix_EII.diagonal(dim1=1, dim2=2)
