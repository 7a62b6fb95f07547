"""Closed forms of attribution (ALA): contributions of experts and channels from one forward pass.

For one token an MoE layer computes ``y = sum_e g_e z_e`` (``g_e`` the routing weight, ``z_e`` the output of expert
``e``, zero for experts that the token is not routed to). The paper attributes the relative L2 loss of the
layer's own output, ``L = sum_t ||y' - y||^2 / ||y||^2``, to experts through an expansion in factors ``alpha_e`` on the
expert outputs, ``y' = sum_e alpha_e g_e z_e``.

Second order. Removing expert ``e`` (``alpha_e = 0``, the others 1) gives ``y' - y = -g_e z_e``, so

    L = sum_t ||g_e z_e||^2 / ||y||^2.

L is quadratic in ``alpha_e``, and both L and its gradient vanish at 1, so this second-order expansion is exact.

First order. The gradient vanishes at the unperturbed point, so the paper evaluates it with all experts scaled by
``1 - eps``. There ``y' = (1 - eps) y``, hence

    dL/dalpha_e = sum_t 2 <y' - y, g_e z_e> / ||y||^2 = -2 eps sum_t <g_e z_e, y> / ||y||^2.

The score ``-dL/dalpha_e`` is therefore ``2 eps`` times ``sum_t <g_e z_e, y> / ||y||^2``. Written as the paper does,
with the gradient at the scaled output ``z'_e = (1 - eps) z_e``, it is ``-<dL/dz'_e, z'_e>``, the same sum times
``2 eps (1 - eps)``. Both constants are common to all experts, layers and tokens and are left out.

``y`` is the output of the whole layer. A shared expert counts as one more expert with routing weight 1: it is scaled
like the others, has its term in the sum, and is never pruned. The first order, summed over all experts including the
shared one, is the number of tokens with ``y != 0``.

Functions take rows in any floating dtype on any device and return float64 on that device; callers add over batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.ragged import ExpertWeights
from moe_coverage_plugin.options import ChannelMetric

# rows per step, so that copies in a wider dtype stay small
CHUNK_ROWS = 1 << 14


class ExpertContributions(NamedTuple):
    """Contributions of experts to routed tokens, float64 ``[M]`` (derived in the module docstring)."""

    first_order_M: Tensor
    second_order_M: Tensor


def expert_contributions(z_MH: Tensor, routing_weight_M: Tensor, y_TH: Tensor, token_M: Tensor) -> ExpertContributions:
    """First-order ``<g z, y> / ||y||^2`` and second-order ``||g z||^2 / ||y||^2`` of experts, row by row.

    Source: paper, section on attribution; closed forms derived in the module docstring. Tokens with ``y = 0``
    contribute zero, because the loss is relative to ``||y||``.

    Args:
        z_MH: outputs of experts, before the routing weight.
        routing_weight_M: routing weights, floating.
        y_TH: output of the layer, shared experts included.
        token_M: token of each row, int64.
    """
    assert routing_weight_M.shape == token_M.shape == z_MH.shape[:1]
    norm_T = torch.cat([_squared_norms(rows_TH) for rows_TH in y_TH.split(CHUNK_ROWS)])
    inverse_M = torch.where(norm_T > 0, 1 / norm_T, 0.0)[token_M]
    dots, norms = [], []
    for rows_MH, tokens_M in zip(z_MH.split(CHUNK_ROWS), token_M.split(CHUNK_ROWS), strict=True):
        rows_MH = _at_least_float32(rows_MH)
        # of the entries of a row in this dtype: on a GPU, a sum in a wider one first makes a copy in it
        dots.append((rows_MH * y_TH[tokens_M]).sum(-1).double())
        norms.append(_squared_norms(rows_MH))
    routing_weight_M = routing_weight_M.double()
    return ExpertContributions(
        routing_weight_M * torch.cat(dots) * inverse_M, routing_weight_M.square() * torch.cat(norms) * inverse_M
    )


def segment_sums(values: Tensor, lengths_E: Tensor) -> Tensor:
    """Sums over the rows of each expert, float64 ``[E, ...]``; rows of one expert are contiguous.

    Args:
        values: ``[M, ...]``.
        lengths_E: rows of each expert, int64 on the same device. Their sum must be ``M``; this is not checked, because
            a check would synchronize with the device.
    """
    return torch.segment_reduce(values.double(), "sum", lengths=lengths_E, axis=0, unsafe=True)


def squares(a_MI: Tensor) -> Tensor:
    """Squares in float32 or wider; their sum over an expert's tokens is the squared norm of each channel."""
    return _at_least_float32(a_MI).square()


def finalize_channel_scores(
    metric: ChannelMetric,
    channel_sums_I: Tensor,
    weights: ExpertWeights | None = None,
    input_sums_H: Tensor | None = None,
) -> Tensor:
    """Scores of one expert's channels from its sums over the whole calibration set (paper, appendix C.3.1).

    ``activation``: L2 norm over routed tokens of the channel's activation ``A`` (the input of ``down_proj``).
    ``weight``: mean of the L2 norms of the channel's column of ``down`` and rows of ``up`` and ``gate``.
    ``weight_activation``: mean over the three projections of ``sum |W| * ||input||``: the weights of the channel times
    the L2 norm over routed tokens of their input, which is ``A`` for ``down`` and the hidden state for the others.

    Args:
        metric: one of ``ChannelMetric``.
        channel_sums_I: :func:`squares` of ``A``, summed over its tokens.
        weights: the expert; needed by ``weight`` and ``weight_activation``.
        input_sums_H: :func:`squares` of the expert's input, summed over its tokens; needed by
            ``weight_activation``.

    Returns:
        ``scores_I`` float64 on the device of ``channel_sums_I``. An expert without tokens scores zero except by
        ``weight``.
    """
    activation_norm_I = channel_sums_I.double().sqrt()
    if metric == "activation":
        return activation_norm_I
    assert weights is not None
    device = channel_sums_I.device
    projections = (weights.gate_NH, weights.up_NH, weights.down_HN)
    gate_IH, up_IH, down_HI = (w.detach().to(device, torch.float64) for w in projections)
    if metric == "weight":
        return (down_HI.norm(dim=0) + up_IH.norm(dim=1) + gate_IH.norm(dim=1)) / 3
    assert input_sums_H is not None
    input_norm_H = input_sums_H.double().sqrt()
    from_input_I = (up_IH.abs() + gate_IH.abs()) @ input_norm_H
    return (down_HI.abs().sum(0) * activation_norm_I + from_input_I) / 3


def _squared_norms(rows_MH: Tensor) -> Tensor:
    return squares(rows_MH).sum(-1).double()


def _at_least_float32(x: Tensor) -> Tensor:
    # products of two bfloat16 or float16 are exact in float32, so a float64 copy would only double the traffic
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
