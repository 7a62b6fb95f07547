"""Channel scores and expert importance from the gradient of the model's loss (paper, appendix C.3.1, and ``fisher``).

The loss is the sum of the next-token losses of all calibration tokens, ``NLL``. Scaling channel ``c`` of an expert by
``m_c`` changes it, to first order, by ``(m_c - 1) sum_t u_tc`` with ``u_tc = A_tc dNLL/dA_tc``. The sum of the squares

    fisher: s_c = sum_t u_tc^2

estimates the diagonal of the Fisher information of ``m``, and with it the rise of the loss, up to one constant for the
whole model, when the channel is removed: tokens' contributions cannot cancel, and scores of different layers share one
unit. ``obs`` is the same for an expert whose other channels take over (:mod:`~moe_coverage_plugin.core.obs`).
The other metrics are the paper's. Each averages over the projections of an expert, where the values of a channel
``v`` are the outputs of ``gate_proj`` and ``up_proj`` and the input ``A`` of ``down_proj``:

    gradient:            s_c = mean_v ||dNLL/dv_c||_2, over tokens
    activation_gradient: s_c = mean_v sum_t |v_tc dNLL/dv_tc|
    snip:                s_c = mean_W sum |W_c * dNLL/dW_c|, over the weights of the channel, added over batches

An expert as a whole has ``u_t = <dNLL/dz_t, z_t>`` for its output ``z``, which is ``sum_c u_tc`` and, where
``down_proj`` has a bias, ``<dNLL/dz_t, bias>``. Its importance is one of

    nll_signed = -sum_t u_t,    nll_absolute = sum_t |u_t|,    nll_squared = sum_t u_t^2.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from moe_coverage_plugin.core.attribution import ChannelMetric, ExpertImportance

GRADIENT_METRICS = ("gradient", "activation_gradient", "snip", "fisher", "obs")
NLL_IMPORTANCES = ("nll_signed", "nll_absolute", "nll_squared")
assert set(GRADIENT_METRICS) < set(get_args(ChannelMetric))
assert set(NLL_IMPORTANCES) < set(get_args(ExpertImportance))


class NllSums(NamedTuple):
    """Terms of the three importances for each token, or their sums over tokens; float64."""

    signed: Tensor
    absolute: Tensor
    squared: Tensor


def products(value_MI: Tensor, grad_MI: Tensor) -> Tensor:
    """``v_tc dNLL/dv_tc`` of tokens, in float32 or wider."""
    assert value_MI.shape == grad_MI.shape
    return _wide(value_MI) * _wide(grad_MI)


def fisher_terms(products_MI: Tensor) -> Tensor:
    """What each token adds to ``fisher``, from the products at the input of ``down_proj``."""
    return products_MI.square()


def activation_gradient_terms(products_MI: Tensor) -> Tensor:
    """What each token adds to ``activation_gradient`` at one projection."""
    return products_MI.abs()


def gradient_terms(grad_MI: Tensor) -> Tensor:
    """What each token adds to the square of ``gradient`` at one projection."""
    return _wide(grad_MI).square()


def snip_scores(weight_OI: Tensor, input_MI: Tensor, grad_MO: Tensor, channel_dim: int) -> Tensor:
    """``sum |W * dNLL/dW|`` of one expert over the weights that each channel owns, in one batch, float64.

    Args:
        weight_OI: a projection, ``[out, in]``.
        input_MI: what it was given for the expert's tokens.
        grad_MO: gradient at its output.
        channel_dim: 0 where channels are outputs (``gate_proj``, ``up_proj``), 1 where they are inputs.
    """
    weight_grad_OI = _wide(grad_MO).T @ _wide(input_MI)
    return (_wide(weight_OI) * weight_grad_OI).abs().sum(1 - channel_dim, dtype=torch.float64)


def nll_terms(u_M: Tensor) -> NllSums:
    """What each token adds to the three importances of its expert, from ``u_t = <dNLL/dz_t, z_t>``."""
    u_M = u_M.double()
    return NllSums(-u_M, u_M.abs(), u_M.square())


def finalize_gradient_scores(metric: ChannelMetric, sums_UEI: Tensor) -> Tensor:
    """Channel scores ``[E, I]`` from the sums at each projection (one for ``fisher``), added over batches.

    Not for ``obs``, whose sums are matrices.
    """
    assert metric in GRADIENT_METRICS
    assert metric != "obs"
    return (sums_UEI.sqrt() if metric == "gradient" else sums_UEI).mean(0)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
