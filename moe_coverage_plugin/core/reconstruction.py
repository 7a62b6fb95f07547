"""Least squares for a pruned expert: the kept columns of ``down_proj`` are refitted to the output of the whole expert.

An expert computes ``z = W A`` with ``W = down_proj`` (``[H, I]``) and ``A`` its activation. With channels ``k`` kept
and ``p`` pruned, over calibration tokens with routing weights ``g``, the new columns minimise

    sum_t g_t^2 ||W A_t - W' A_tk||^2 + lambda ||W' - W_k||^2.

With the Gram matrix ``G = sum_t g_t^2 A_t A_t^T`` the normal equations give

    W' = W_k + W_p G_pk (G_kk + lambda I)^-1.

The ridge pulls towards the old columns, not towards zero, so an expert with few tokens stays close to pruning without
reconstruction. A bias of ``down_proj`` is common to both sides and cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2


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
    device = down_HI.device
    kept_N = kept_N.to(device)
    gram_II = gram_II.to(device, torch.float64)
    old_HN = down_HI.detach()[:, kept_N]
    gram_NN = gram_II[kept_N][:, kept_N]
    scale = gram_NN.diagonal().mean() if kept_N.numel() else 0.0
    pruned_P = torch.ones(down_HI.shape[1], dtype=torch.bool, device=device)
    pruned_P[kept_N] = False
    if not float(scale) > 0.0 or not bool(pruned_P.any()):
        return old_HN
    identity_NN = torch.eye(kept_N.numel(), dtype=torch.float64, device=device)
    factor_NN = torch.linalg.cholesky(gram_NN + ridge * scale * identity_NN)
    gram_NP = gram_II[kept_N][:, pruned_P]
    transfer_NP = torch.cholesky_solve(gram_NP, factor_NN)
    change_HN = down_HI.detach()[:, pruned_P].double() @ transfer_NP.T
    return (old_HN.double() + change_HN).to(down_HI.dtype)
