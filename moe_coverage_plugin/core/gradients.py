"""Channel scores and expert importance from the gradient of the model's loss (paper, appendix C.3.1, and ``fisher``).

The loss is the sum of the next-token losses of all calibration tokens, ``NLL``. Scaling channel ``c`` of an expert by
``m_c`` changes it, to first order, by ``(m_c - 1) sum_t u_tc`` with ``u_tc = A_tc dNLL/dA_tc``. The sum of the squares

    fisher: s_c = sum_t u_tc^2

estimates the diagonal of the Fisher information of ``m``, and so, up to one constant for the whole model, the rise of
the loss when the channel is removed. Contributions of different tokens cannot cancel, and scores of all layers have
one unit. ``obs`` is the same estimate for an expert whose other channels are refitted
(:mod:`~moe_coverage_plugin.core.obs`). The other metrics are the paper's. Each is a mean over the projections of an
expert; the values of a channel ``v`` are the outputs of ``gate_proj`` and ``up_proj`` and the input ``A`` of
``down_proj``:

    gradient:            s_c = mean_v ||dNLL/dv_c||_2, over tokens
    activation_gradient: s_c = mean_v sum_t |v_tc dNLL/dv_tc|
    snip:                s_c = mean_W sum |W_c * dNLL/dW_c|, over the weights of the channel, added over batches

For the output ``z`` of an expert, ``u_t = <dNLL/dz_t, z_t>``. It equals ``sum_c u_tc``, plus ``<dNLL/dz_t, bias>`` if
``down_proj`` has a bias. The importance of the expert is one of

    nll_signed = -sum_t u_t,    nll_absolute = sum_t |u_t|,    nll_squared = sum_t u_t^2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.options import GRADIENT_METRICS, ChannelMetric


class NllSums(NamedTuple):
    """Terms of the three importances of each token, or their sums over tokens; float64."""

    signed: Tensor
    absolute: Tensor
    squared: Tensor


def products(value_MI: Tensor, grad_MI: Tensor) -> Tensor:
    """``v_tc dNLL/dv_tc`` of each token, in float32 or wider."""
    assert value_MI.shape == grad_MI.shape
    # the product is in the wider dtype, without a copy of both factors in it
    return _wide(value_MI) * grad_MI.detach()


def fisher_terms(products_MI: Tensor) -> Tensor:
    """Terms of ``fisher`` from the products at the input of ``down_proj``."""
    return products_MI.square()


def activation_gradient_terms(products_MI: Tensor) -> Tensor:
    """Terms of ``activation_gradient`` at one projection."""
    return products_MI.abs()


def active_rows(a_MI: Tensor) -> Tensor:
    """Rows with an activation other than zero, bool ``[M]``.

    ``obs`` and ``gradient`` leave out the gradients of all others; terms of the other metrics are zero there anyway.
    No channel contributes to the output of such a row, so the removal of none changes it. Its gradients can still be
    larger than those of all other tokens together: in a model without biases, a hidden state of zeros (the embedding
    of a padding token, at the beginning of a window) stays zero, and each RMSNorm of it multiplies gradients by
    ``1 / sqrt(eps)``.
    """
    return a_MI.any(-1)


def gradient_terms(grad_MI: Tensor, active_M: Tensor) -> Tensor:
    """Terms of the square of ``gradient`` at one projection, and of the diagonal of ``obs``.

    Args:
        grad_MI: gradients of the loss.
        active_M: :func:`active_rows`; the terms of others are zero.
    """
    return _wide(grad_MI).square().masked_fill_(~active_M[:, None], 0)


def snip_scores(weight_OI: Tensor, input_MI: Tensor, grad_MO: Tensor, channel_dim: int) -> Tensor:
    """``sum |W * dNLL/dW|`` of one expert over the weights of each channel, in one batch, float64.

    Args:
        weight_OI: a projection, ``[out, in]``.
        input_MI: its input for the expert's tokens.
        grad_MO: gradient of the loss at its output.
        channel_dim: 0 if channels are outputs (``gate_proj``, ``up_proj``), 1 if they are inputs (``down_proj``).
    """
    weight_grad_OI = _wide(grad_MO).T @ _wide(input_MI)
    return (_wide(weight_OI) * weight_grad_OI).abs().sum(1 - channel_dim, dtype=torch.float64)


def nll_terms(u_M: Tensor) -> NllSums:
    """Terms of the three importances of an expert from ``u_t = <dNLL/dz_t, z_t>``."""
    u_M = u_M.double()
    return NllSums(-u_M, u_M.abs(), u_M.square())


def finalize_gradient_scores(metric: ChannelMetric, sums_UEI: Tensor) -> Tensor:
    """Channel scores ``[E, I]`` from the sums over all batches at each projection (one projection for ``fisher``).

    ``obs`` has another function, because its sums are matrices.
    """
    assert metric in GRADIENT_METRICS
    assert metric != "obs"
    return (sums_UEI.sqrt() if metric == "gradient" else sums_UEI).mean(0)


def effective_tokens(sums: Tensor, squares: Tensor) -> Tensor:
    """Number of tokens that a score with terms ``s_t`` rests on: ``(sum_t s_t)^2 / sum_t s_t^2`` (Kish, 1965).

    A score with one dominant term rests on that token, however many were routed to the expert.

    Args:
        sums: ``sum_t s_t``, any shape.
        squares: ``sum_t s_t^2``.

    Returns:
        Float64, 0 if there is no term.
    """
    return torch.where(squares > 0, sums.double().square() / squares.double(), 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
