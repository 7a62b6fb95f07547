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
(:func:`choose_ridge`), and no fit at all is one of the choices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_coverage_plugin.core.factors import inverse_cholesky
from moe_coverage_plugin.core.products import SIXTEEN_BITS, tf32_products

RIDGE = 1e-2
# candidates, relative to the mean of the diagonal of G_kk; infinite: the old columns
RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, math.inf)


def gram(a_MI: Tensor, routing_weight_M: Tensor) -> Tensor:
    """``sum_t g_t^2 A_t A_t^T`` over the tokens routed to one expert, ``[I, I]`` in float32 or wider.

    On a GPU, activations in 16 bits are weighted in float32 and multiplied in TF32, which rounds them less than their
    own dtype has done already.
    """
    dtype = torch.promote_types(a_MI.dtype, torch.float32)
    weighted_MI = a_MI.detach().to(dtype) * routing_weight_M.detach().to(dtype)[:, None]
    with tf32_products(a_MI.dtype in SIXTEEN_BITS):
        return weighted_MI.T @ weighted_MI


@torch.no_grad()
def reconstruct_down(down_EHI: Tensor, gram_EII: Tensor, kept_EN: Tensor, ridge_E: Tensor) -> Tensor:
    """Refitted columns of ``down_proj`` for the kept channels (module docstring), for experts of one width together.

    Args:
        down_EHI: the unpruned weights, any floating dtype.
        gram_EII: :func:`gram` of each expert, added over batches.
        kept_EN: indices of the kept channels, ascending int64, all different.
        ridge_E: ``lambda`` relative to the mean of the diagonal of ``G_kk``; infinite: the old columns.

    Returns:
        ``[E, H, N]`` in the dtype and on the device of ``down_EHI``. An expert keeps the old columns if its Gram
        matrix is zero or is not positive definite with the ridge, or no channel is pruned.
    """
    channels = _Channels(down_EHI, kept_EN)
    gram_ENN, gram_ENP = channels.split(gram_EII)
    ridge_E = ridge_E.to(gram_ENN)
    fits_E = ridge_E.isfinite()
    inverse_1ENN, solved_1E = inverse_with_ridge(gram_ENN, ridge_E.where(fits_E, 1.0)[None])
    change_EHN = channels.pruned_columns_EHP @ gram_ENP.mT @ inverse_1ENN[0]
    old_EHN = channels.kept_columns_EHN
    fitted_EHN = (old_EHN.double() + change_EHN).to(old_EHN.dtype)
    return fitted_EHN.where((fits_E & solved_1E[0])[:, None, None], old_EHN)


@torch.no_grad()
def choose_ridge(down_EHI: Tensor, fitted_EII: Tensor, held_EII: Tensor, kept_EN: Tensor) -> Tensor:
    """The ridge of :data:`RIDGES` that held-back tokens choose (:func:`best_fit`), for experts of one width.

    Args:
        down_EHI: the unpruned weights.
        fitted_EII: :func:`gram` of the tokens to fit.
        held_EII: :func:`gram` of the tokens held back.
        kept_EN: indices of the kept channels.

    Returns:
        ``[E]`` float64 on the device of ``down_EHI``; infinite if no fit is better than the old columns, or there are
        no tokens to fit or to test.
    """
    channels = _Channels(down_EHI, kept_EN)
    (fitted_ENN, fitted_ENP), (held_ENN, held_ENP) = map(channels.split, (fitted_EII, held_EII))
    # W_p G_pk, the products of outputs and kept channels, enter by these two alone
    fitted_outputs_ENP = fitted_ENP @ (channels.pruned_columns_EHP.mT @ channels.pruned_columns_EHP)
    return best_ridge(fitted_ENN, held_ENN, fitted_outputs_ENP @ fitted_ENP.mT, fitted_outputs_ENP @ held_ENP.mT)


def best_ridge(fitted_ENN: Tensor, held_ENN: Tensor, square_ENN: Tensor, cross_ENN: Tensor) -> Tensor:
    """The ridge of :data:`RIDGES` whose change of the columns held-back tokens choose.

    The change is ``C = F^T X`` with ``X = (G + lambda I)^-1``, where ``F`` are products of the activations ``[N]`` and
    of what is missing in the outputs ``[H]``, summed over fitted tokens. With ``B``, the same sum over held-back ones,
    and their Gram matrix ``S``, it takes ``2 <C, B^T> - <C, C S>`` from their error, which is computed without ``C``.

    Args:
        fitted_ENN: ``G``, float64.
        held_ENN: ``S``.
        square_ENN: ``F F^T``.
        cross_ENN: ``F B^T``.

    Returns:
        ``[E]``, infinite if no change is better than none.
    """
    ridges_R = torch.tensor(RIDGES[-2::-1], dtype=fitted_ENN.dtype, device=fitted_ENN.device)
    inverse_RENN, solved_RE = inverse_with_ridge(fitted_ENN, ridges_R[:, None].expand(-1, len(fitted_ENN)))
    gains_RE = 2 * (inverse_RENN * cross_ENN).sum((-2, -1))
    gains_RE -= ((inverse_RENN @ square_ENN @ inverse_RENN) * held_ENN).sum((-2, -1))
    fit_E, better_E = best_fit(gains_RE.where(solved_RE, -math.inf))
    return ridges_R[fit_E].where(better_E, math.inf)


def best_fit(gains_RE: Tensor) -> tuple[Tensor, Tensor]:
    """The fit of each expert that gains most; of equal ones the first.

    Args:
        gains_RE: by how much each fit lowers the error on held-back tokens, the fit nearest to the old weights first;
            a gain that is not a number is none.

    Returns:
        ``[E]``: the index of the fit, and whether any fit gains something.
    """
    gains_RE = gains_RE.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    most_E = gains_RE.amax(0)
    # argmax alone need not return the first of equal maxima
    return (gains_RE == most_E).to(torch.int8).argmax(0), most_E > 0


def inverse_with_ridge(gram_ENN: Tensor, ridges_RE: Tensor) -> tuple[Tensor, Tensor]:
    """``(G + lambda I)^-1`` of all experts for each ridge together, without a wait for the device.

    Args:
        gram_ENN: ``G``, symmetric.
        ridges_RE: ``lambda`` relative to the mean of the diagonal of ``G``; any scale for a matrix of zeros.

    Returns:
        ``[R, E, N, N]``, and ``[R, E]``: whether ``G + lambda I`` is positive definite, without which there is none.
    """
    scale_E = gram_ENN.diagonal(dim1=-2, dim2=-1).mean(-1)
    regular_RENN = gram_ENN.expand(len(ridges_RE), -1, -1, -1).clone()
    regular_RENN.diagonal(dim1=-2, dim2=-1).add_((ridges_RE * scale_E.where(scale_E > 0, 1.0))[..., None])
    half_DNN, solved_D = inverse_cholesky(regular_RENN.flatten(0, 1))
    return (half_DNN.mT @ half_DNN).view_as(regular_RENN), solved_D.view(regular_RENN.shape[:2])


class _Channels:
    """The kept and the pruned channels of experts of one width, and their columns of ``down_proj``."""

    def __init__(self, down_EHI: Tensor, kept_EN: Tensor):
        down_EHI = down_EHI.detach()
        self._kept_EN = kept_EN = kept_EN.to(down_EHI.device)
        pruned_EI = torch.ones(len(kept_EN), down_EHI.shape[2], dtype=torch.int8, device=down_EHI.device)
        pruned_EI.scatter_(1, kept_EN, 0)
        # all experts have as many of them, so that no number need be read from the device
        order_EI = pruned_EI.argsort(dim=1, descending=True, stable=True)
        self._pruned_EP = order_EI[:, : down_EHI.shape[2] - kept_EN.shape[1]]
        self.kept_columns_EHN = _columns(down_EHI, kept_EN)
        self.pruned_columns_EHP = _columns(down_EHI, self._pruned_EP).double()

    def split(self, gram_EII: Tensor) -> tuple[Tensor, Tensor]:
        """The parts ``G_kk`` and ``G_kp`` in float64."""
        gram_EII = gram_EII.to(self._kept_EN.device)
        experts_E11 = torch.arange(len(gram_EII), device=gram_EII.device)[:, None, None]
        rows_EN1 = self._kept_EN[:, :, None]
        kept_ENN = gram_EII[experts_E11, rows_EN1, self._kept_EN[:, None]]
        return kept_ENN.double(), gram_EII[experts_E11, rows_EN1, self._pruned_EP[:, None]].double()


def _columns(down_EHI: Tensor, channels_EN: Tensor) -> Tensor:
    return down_EHI.gather(2, channels_EN[:, None].expand(-1, down_EHI.shape[1], -1))
