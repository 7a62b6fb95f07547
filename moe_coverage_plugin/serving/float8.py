"""Linear layers in 8-bit floats (``FP8_DYNAMIC`` of llm-compressor) in plain torch, the reference for the kernels.

A weight matrix has a scale for each output channel, from the checkpoint. Activations get a scale for each token, from
the token's largest absolute value, at the input of each projection.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of ``FLOAT8``."""

SMALLEST = 1e-30
"""Lower bound of a token's largest absolute value; without it the factor would overflow."""


def quantize_tokens(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations to ``FLOAT8``, rounding to nearest.

    Returns:
        ``q_TH`` in ``FLOAT8`` and ``scale_T1`` in float32, so that ``q_TH * scale_T1`` approximates ``x_TH``.
    """
    x_TH = x_TH.float()
    largest_T1 = x_TH.abs().amax(-1, keepdim=True) if x_TH.shape[-1] else x_TH.new_zeros(len(x_TH), 1)
    largest_T1 = largest_T1.clamp(min=SMALLEST)
    return (x_TH * (LARGEST / largest_T1)).to(FLOAT8), largest_T1 / LARGEST


def linear(x_TA: Tensor, weight_OA: Tensor, scale_O1: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute ``x_TA @ weight_OA.T + bias_O`` of 8-bit activations and weights, summed in float32.

    Args:
        x_TA: activations, which are quantized here.
        weight_OA: in ``FLOAT8``.
        scale_O1: floating; has no columns if ``A`` is 0, as for the channels of an expert of which a rank holds none.
        bias_O: floating.

    Returns:
        ``y_TO`` in the dtype of ``x_TA``.
    """
    q_TA, scale_T1 = quantize_tokens(x_TA)
    # the sum over one column is that column, and the sum over none is zero
    y_TO = F.linear(q_TA.float(), weight_OA.float()) * scale_T1 * scale_O1.float().sum(-1)
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(x_TA.dtype)
