"""Widths of experts as a layout stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.manifest import Layout


def uniform_width(budget: int, experts: int, block_size: int) -> int:
    """Return the channels that a budget leaves each of ``experts``, in multiples of the block size."""
    average = budget // experts
    return average - average % block_size


def stored_widths(layout: Layout, widths_LE: Tensor, budget: int, block_size: int) -> Tensor:
    """Return the kept channels of every expert as a layout can store them.

    Args:
        layout: ``padded`` and ``uniform`` cannot remove experts.
        widths_LE: planned channels of every expert, int64.
        budget: channels to keep, which ``uniform`` shares equally.
        block_size: channels that widths are multiples of.

    Returns:
        widths ``[L, E]``, int64.
    """
    match layout:
        case "ragged":
            return widths_LE
        case "padded":
            return widths_LE.clamp(min=block_size)
        case "uniform":
            return torch.full_like(widths_LE, uniform_width(budget, widths_LE.numel(), block_size))
