"""Weights and activations in 8-bit floats (``FP8_DYNAMIC`` of the toolkit), in plain torch: the kernels' measure.

A matrix of weights has a scale for each output channel, from the checkpoint. Activations get one for each token, from
the largest of its values, wherever they enter a projection.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of ``FLOAT8``."""

SMALLEST = 1e-30
"""Where the largest of a token is smaller, its scale is that of this number, or factors would overflow."""


def quantize_tokens(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Activations in ``FLOAT8``, rounded to nearest, and their scales.

    Returns:
        ``q_TH`` in ``FLOAT8`` and float32 ``scale_T1``, by which it is multiplied to come back.
    """
    x_TH = x_TH.float()
    largest_T1 = x_TH.abs().amax(-1, keepdim=True) if x_TH.shape[-1] else x_TH.new_zeros(len(x_TH), 1)
    largest_T1 = largest_T1.clamp(min=SMALLEST)
    return (x_TH * (LARGEST / largest_T1)).to(FLOAT8), largest_T1 / LARGEST


def linear(x_TH: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x_TH @ weight.T + bias`` of 8-bit activations and weights, summed in float32, in the dtype of ``x_TH``.

    Args:
        x_TH: activations, quantized here.
        weight: ``FLOAT8`` ``[rows, H]``.
        scale: floating ``[rows, 1]``, or ``[rows, 0]`` without channels.
        bias: ``[rows]``.
    """
    q_TH, scale_T1 = quantize_tokens(x_TH)
    # a rank without channels of an expert has no scales of them, and the sum of nothing is zero
    y = F.linear(q_TH.float(), weight.float()) * scale_T1 * scale.float().sum(-1)
    return (y if bias is None else y + bias.float()).to(x_TH.dtype)
