"""Least squares for a pruned expert: kept columns of ``down_proj`` are refitted to the output of the unpruned expert.

An expert computes ``z = W A`` with ``W = down_proj`` (``[H, I]``) and ``A`` its activation. With channels ``k`` kept
and ``p`` pruned, over calibration tokens with routing weights ``g``, the new columns minimise

    sum_t g_t^2 ||W A_t - W' A_tk||^2 + lambda ||W' - W_k||^2.

With the Gram matrix ``G = sum_t g_t^2 A_t A_t^T`` the normal equations give

    W' = W_k + W_p G_pk (G_kk + lambda I)^-1.

The ridge pulls towards the old columns, not towards zero, so a large ``lambda`` is pruning without reconstruction. A
bias of ``down_proj`` is common to both sides and cancels.

How much of the fit carries over to other text depends on the expert: on its tokens, its channels, and how many of them
are pruned. ``lambda`` is therefore chosen for each expert by tokens that were held back from the fit
(:func:`choose_ridge`), and no fit at all is one of the choices. Held-back tokens are of the calibration text too. For
other text, of all fits that gain nearly as much as the best one on them, the one nearest to the old columns is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

RIDGE = 1e-2
# candidates, relative to the mean of the diagonal of G_kk; infinite: the old columns
RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, math.inf)
# of the gain of the best fit on held-back tokens, what the fit that is taken must gain
GAIN_SHARE = 0.85

T = TypeVar("T")


def gram(a_MI: Tensor, routing_weight_M: Tensor) -> Tensor:
    """``sum_t g_t^2 A_t A_t^T`` over the tokens routed to one expert, ``[I, I]`` in float32 or wider."""
    dtype = torch.promote_types(a_MI.dtype, torch.float32)
    weighted_MI = a_MI.detach().to(dtype) * routing_weight_M.detach().to(dtype)[:, None]
    return weighted_MI.T @ weighted_MI


def reconstruct_down(down_HI: Tensor, gram_II: Tensor, kept_N: Tensor, ridge: float = RIDGE) -> Tensor:
    """Refitted columns of ``down_proj`` for the kept channels (module docstring).

    Args:
        down_HI: the unpruned weight, any floating dtype.
        gram_II: :func:`gram`, added over batches.
        kept_N: indices of the kept channels, ascending int64, all different.
        ridge: ``lambda`` relative to the mean of the diagonal of ``G_kk``.

    Returns:
        ``[H, N]`` in the dtype and on the device of ``down_HI``; the old columns if the Gram matrix is zero or no
        channel is pruned.
    """
    kept_N = kept_N.to(down_HI.device)
    gram_II = gram_II.to(down_HI.device, torch.float64)
    old_HN = down_HI.detach()[:, kept_N]
    pruned_P = _others(kept_N, down_HI.shape[1])
    if not _can_fit(gram_II, kept_N, pruned_P) or math.isinf(ridge):
        return old_HN
    transfer_NP = _transfer(gram_II, kept_N, pruned_P, ridge)
    change_HN = down_HI.detach()[:, pruned_P].double() @ transfer_NP.T
    return (old_HN.double() + change_HN).to(down_HI.dtype)


def choose_ridge(down_HI: Tensor, fitted_II: Tensor, held_II: Tensor, kept_N: Tensor) -> float:
    """The ridge of :data:`RIDGES` that held-back tokens choose (:func:`nearest_fit`).

    Args:
        down_HI: the unpruned weight.
        fitted_II: :func:`gram` of the tokens to fit.
        held_II: :func:`gram` of the tokens held back.
        kept_N: indices of the kept channels.

    Returns:
        The largest ridge that gains nearly as much, infinite if no fit is better than the old columns, or there are no
        tokens to fit or to test.
    """
    kept_N = kept_N.to(down_HI.device)
    fitted_II, held_II = (each.to(down_HI.device, torch.float64) for each in (fitted_II, held_II))
    pruned_P = _others(kept_N, down_HI.shape[1])
    if not _can_fit(fitted_II, kept_N, pruned_P) or not _can_fit(held_II, kept_N, pruned_P):
        return math.inf
    # the error is tr(W_p R^T G R W_p^T), where R are the residuals of pruned channels on kept ones
    down_HP = down_HI.detach()[:, pruned_P].double()
    outputs_PP = down_HP.T @ down_HP
    held_NN, held_NP = held_II[kept_N][:, kept_N], held_II[kept_N][:, pruned_P]
    # the error of old columns is common to all, so only what a fit takes from it is compared
    gains = {}
    for ridge in reversed(RIDGES[:-1]):
        transfer_NP = _transfer(fitted_II, kept_N, pruned_P, ridge)
        gained_PP = transfer_NP.T @ (2 * held_NP - held_NN @ transfer_NP)
        gains[ridge] = float((gained_PP * outputs_PP).sum())
    best = nearest_fit(gains)
    return math.inf if best is None else best


def nearest_fit(gains: Mapping[T, float]) -> T | None:
    """The first fit that gains :data:`GAIN_SHARE` of what the best one gains, ``None`` if none gains anything.

    Args:
        gains: by how much each fit lowers the error on held-back tokens, the fit nearest to the old weights first.
    """
    most = max(gains.values())
    return next(fit for fit, gain in gains.items() if gain >= GAIN_SHARE * most) if most > 0.0 else None


def _others(kept_N: Tensor, channels: int) -> Tensor:
    pruned_P = torch.ones(channels, dtype=torch.bool, device=kept_N.device)
    pruned_P[kept_N] = False
    return pruned_P.nonzero().flatten()


def _can_fit(gram_II: Tensor, kept_N: Tensor, pruned_P: Tensor) -> bool:
    return bool(kept_N.numel()) and bool(pruned_P.numel()) and float(gram_II.diagonal()[kept_N].sum()) > 0.0


def _transfer(gram_II: Tensor, kept_N: Tensor, pruned_P: Tensor, ridge: float) -> Tensor:
    """``(G_kk + lambda I)^-1 G_kp``: what each kept channel takes over of each pruned one."""
    gram_NN = gram_II[kept_N][:, kept_N]
    scale = gram_NN.diagonal().mean()
    identity_NN = torch.eye(kept_N.numel(), dtype=torch.float64, device=gram_II.device)
    factor_NN = torch.linalg.cholesky(gram_NN + ridge * scale * identity_NN)
    return torch.cholesky_solve(gram_II[kept_N][:, pruned_P], factor_NN)
