"""Activations to 8-bit floats, with a scale for each token; ``serving.float8`` in a kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_coverage_plugin.serving.float8 import LARGEST, SMALLEST
from moe_coverage_plugin.serving.kernels.arithmetic import rounded

BLOCK = 2048
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


@triton.jit
def quantize_kernel(
    x_ptr, expert_ptr, table_ptr, q_ptr, scale_ptr, columns, x_stride,
    OF_EXPERTS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row.

    Args:
        x_ptr: ``[rows, x_stride]``, of which the first ``columns`` are read, or the channels of the row's expert in
            whole units if ``OF_EXPERTS``.
        expert_ptr, table_ptr: experts of rows, negative ones have no channels, and their table.
        q_ptr: ``[rows, x_stride]`` in 8-bit floats; what is not read is not written.
        scale_ptr: float32 ``[rows]``, written for every row.
    """
    row = tl.program_id(0).to(tl.int64)
    if OF_EXPERTS:
        expert = tl.load(expert_ptr + row).to(tl.int64)
        width = tl.load(table_ptr + expert * 4, mask=expert >= 0, other=0).to(tl.int32)
        columns = (width + UNIT - 1) // UNIT * UNIT
    column = tl.arange(0, BLOCK)
    largest_B = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        x_B = tl.load(x_ptr + row * x_stride + start + column, mask=start + column < columns, other=0.0)
        largest_B = tl.maximum(largest_B, tl.abs(x_B.to(tl.float32)))
    largest = tl.maximum(tl.max(largest_B), _SMALLEST)
    tl.store(scale_ptr + row, tl.div_rn(largest, _LARGEST))
    # rounded as in the reference: where a scale is a power of two, many values lie in the middle of two
    factor = tl.div_rn(_LARGEST, largest)
    for start in range(0, columns, BLOCK):
        inside = start + column < columns
        x_B = tl.load(x_ptr + row * x_stride + start + column, mask=inside, other=0.0)
        q_B = rounded(x_B.to(tl.float32) * factor, tl.float8e4nv)
        tl.store(q_ptr + row * x_stride + start + column, q_B, mask=inside)


def quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_tokens`` of ``serving.float8``; the scales are flat."""
    return _launch(x_TH, x_TH.shape[1], None, None, 1)


def quantize_channels(h_PN: Tensor, experts_P: Tensor, table_E4: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """``quantize`` of the channels that each pair's expert has.

    Args:
        h_PN: hidden channels of pairs, defined up to the width of their expert in whole units.
        experts_P: experts of pairs, flat.
        table_E4, unit: see ``KernelWeights``.
    """
    return _launch(h_PN, 0, experts_P, table_E4, unit)


def _launch(
    x: Tensor, columns: int, experts_P: Tensor | None, table_E4: Tensor | None, unit: int
) -> tuple[Tensor, Tensor]:
    quantized, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)
    quantize_kernel[(len(x),)](
        *(x, experts_P, table_E4, quantized, scale, columns, x.stride(0)),
        OF_EXPERTS=experts_P is not None,
        UNIT=unit,
        BLOCK=min(BLOCK, triton.next_power_of_2(x.shape[1])),
    )
    return quantized, scale
