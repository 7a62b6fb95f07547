"""Experts of unequal width: the order of their channels, the channels kept, and the reference mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_finite


class ExpertWeights(NamedTuple):
    """One gated expert ``down(act(gate(x)) * up(x))`` with ``N`` channels, in the layout of ``nn.Linear``."""

    gate_NH: Tensor
    up_NH: Tensor
    down_HN: Tensor
    gate_bias_N: Tensor | None = None
    up_bias_N: Tensor | None = None
    down_bias_H: Tensor | None = None


def reference_moe(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    experts: Sequence[ExpertWeights | None],
    act_fn: Callable[[Tensor], Tensor],
    quantized: Callable[[Tensor], Tensor] = Tensor.double,
) -> Tensor:
    """The reference that kernels, loaders and slices are tested against: a loop over experts in float64.

    Args:
        x_TH: hidden states, any floating dtype and device.
        topk_ids_TK: experts picked for each token, integer.
        topk_weights_TK: their routing weights, floating.
        experts: one entry per expert, each with its own width; ``None`` for a removed expert.
        act_fn: the gate's activation, e.g. ``torch.nn.functional.silu``.
        quantized: maps the float64 input ``[M, A]`` of a projection to its values after quantization.

    Returns:
        ``y_TH`` in the dtype of ``x_TH``.

    Raises:
        AssertionError: a token is routed to a removed expert or to one that does not exist.
    """
    assert topk_ids_TK.shape == topk_weights_TK.shape
    assert topk_ids_TK.numel() == 0 or (int(topk_ids_TK.min()) >= 0 and int(topk_ids_TK.max()) < len(experts))
    x64_TH = x_TH.double()
    y64_TH = torch.zeros_like(x64_TH)
    for index, expert in enumerate(experts):
        token_M, slot_M = (topk_ids_TK == index).nonzero(as_tuple=True)
        if expert is None:
            assert token_M.numel() == 0, f"{token_M.numel()} tokens are routed to removed expert {index}"
            continue
        z_MH = _expert_forward(x64_TH[token_M], expert, act_fn, quantized)
        y64_TH.index_add_(0, token_M, z_MH * topk_weights_TK[token_M, slot_M].double()[:, None])
    return y64_TH.to(x_TH.dtype)


def _expert_forward(
    x_MH: Tensor, expert: ExpertWeights, act_fn: Callable[[Tensor], Tensor], quantized: Callable[[Tensor], Tensor]
) -> Tensor:
    gate_NH, up_NH, down_HN, *biases = (None if w is None else w.double() for w in expert)
    assert gate_NH is not None
    assert up_NH is not None
    assert down_HN is not None
    gate_bias_N, up_bias_N, down_bias_H = biases
    linear = torch.nn.functional.linear
    x_MH = quantized(x_MH)
    a_MN = act_fn(linear(x_MH, gate_NH, gate_bias_N)) * linear(x_MH, up_NH, up_bias_N)
    return linear(quantized(a_MN), down_HN, down_bias_H)


def sort_descending(values: Tensor) -> Tensor:
    """Values of the last axis from largest to smallest, as float64 on the CPU. NaN comes last.

    NumPy's sort without indices uses vector units and takes about a seventh of the time of ``torch.sort``.
    """
    # negated in place: page faults of another buffer would cost as much as the sort
    keys = np.negative(values.detach().to("cpu", torch.float64).numpy(), order="C")
    keys.sort(axis=-1)
    return torch.from_numpy(np.negative(keys, out=keys))


def channel_order(scores_LEI: Tensor) -> Tensor:
    """Channels of every expert from the highest score to the lowest; of equal scores the lower index comes first.

    Returns:
        ``order_LEI`` int64 on the CPU.
    """
    return torch.sort(scores_LEI.detach().to("cpu", torch.float64), dim=-1, descending=True, stable=True).indices


def kept_channels(scores_LEI: Tensor, widths_LE: Tensor) -> list[list[Tensor]]:
    """The ``widths_LE[l, e]`` best channels of every expert, as one ascending int64 index each.

    The indices ascend, so that slices of gate, up and down keep the stored order of channels and agree.

    Args:
        scores_LEI: channel scores.
        widths_LE: integer, ``0 <= width <= I``.

    Raises:
        CoverageError: a score is NaN or infinite; the message names layer and expert.
    """
    require_finite(scores_LEI, "channel scores", ("layer", "expert"))
    widths_LE = widths_LE.cpu()
    assert scores_LEI.shape[:-1] == widths_LE.shape
    assert bool(((widths_LE >= 0) & (widths_LE <= scores_LEI.shape[-1])).all())
    order_LEI = channel_order(scores_LEI)
    return [
        [order_I[:width].sort().values for order_I, width in zip(order_EI, widths_E, strict=True)]
        for order_EI, widths_E in zip(order_LEI, widths_LE.tolist(), strict=True)
    ]


def prefix_scores(scores_LEI: Tensor) -> Tensor:
    """``prefix[l, e, n]``: the sum of the ``n`` best channel scores of an expert, ``n = 0..I``.

    Returns:
        ``[L, E, I + 1]`` float64 on the CPU.
    """
    return torch.nn.functional.pad(sort_descending(scores_LEI).cumsum(-1), (1, 0))
