"""Quantization of activations to 8-bit floats with one scale per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_coverage_plugin.serving.float8 import LARGEST, SMALLEST
from moe_coverage_plugin.serving.kernels.arithmetic import round_to
from moe_coverage_plugin.serving.kernels.dependent_launch import launch_options, wait_for_previous_kernel
from moe_coverage_plugin.serving.kernels.expert_table import COLUMNS, WIDTH, known_expert
from moe_coverage_plugin.serving.kernels.routing import next_power_of_2

MAX_BLOCK = 2048
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


@triton.jit
def quantize_kernel(
    x_ptr, expert_ptr, table_ptr, q_ptr, scale_ptr, columns, x_stride,
    OF_EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, UNIT: tl.constexpr, BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``scale[m] = max over a of |x[m, a]| / 448`` and ``q[m, a] = x[m, a] / scale[m]``.

    Grid: one program per row. It reads the row twice, ``BLOCK_A`` columns at a time.

    Numerics: all in float32; ``q`` is rounded to nearest, ties to even. ``x`` is multiplied by ``448 / max``, as the
    reference does, and not divided by ``scale``: if the scale is a power of two, many values are halfway between
    two 8-bit floats, and both must round them alike. A row of zeros gets the scale of ``SMALLEST``.

    Tested against ``serving.float8.quantize_tokens``.

    Pointers:
        x_ptr: floating ``[rows, x_stride]``.
        expert_ptr: integer ``[rows]``, experts of rows if ``OF_EXPERTS``; a number that no expert has has no columns.
        table_ptr: int64 ``[experts, 4]`` if ``OF_EXPERTS``, see ``TableRow``.
        q_ptr: float8_e4m3fn ``[rows, x_stride]``; columns that are not read are not written.
        scale_ptr: float32 ``[rows]``, written for every row.

    Constants (others: see the package):
        OF_EXPERTS: read as many columns as the row's expert has channels, rounded up to a multiple of ``UNIT``, and
            not the first ``columns``.
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    if OF_EXPERTS:
        expert = known_expert(tl.load(expert_ptr + row), NUM_EXPERTS)
        width = tl.load(table_ptr + expert * COLUMNS + WIDTH, mask=expert >= 0, other=0).to(tl.int32)
        columns = (width + UNIT - 1) // UNIT * UNIT
    column_A = tl.arange(0, BLOCK_A)
    max_A = tl.zeros((BLOCK_A,), dtype=tl.float32)
    for start in range(0, columns, BLOCK_A):
        x_A = tl.load(x_ptr + row * x_stride + start + column_A, mask=start + column_A < columns, other=0.0)
        max_A = tl.maximum(max_A, tl.abs(x_A.to(tl.float32)))
    row_max = tl.maximum(tl.max(max_A), _SMALLEST)
    tl.store(scale_ptr + row, tl.div_rn(row_max, _LARGEST))
    factor = tl.div_rn(_LARGEST, row_max)
    for start in range(0, columns, BLOCK_A):
        mask_A = start + column_A < columns
        x_A = tl.load(x_ptr + row * x_stride + start + column_A, mask=mask_A, other=0.0)
        q_A = round_to(x_A.to(tl.float32) * factor, tl.float8e4nv)
        tl.store(q_ptr + row * x_stride + start + column_A, q_A, mask=mask_A)


def quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the hidden states of tokens.

    Returns:
        ``q_TH`` in float8_e4m3fn and float32 ``scale_T``.
    """
    return _launch(x_TH, x_TH.shape[1], None, None, 1)


def quantize_channels(h_MN: Tensor, ids_M: Tensor, table_E4: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Quantize the channels that each pair's expert has.

    Args:
        h_MN: outputs of the gate and up projection, defined up to the width of the pair's expert, rounded up to a
            multiple of ``unit``.
        ids_M: experts of pairs.
        table_E4: see ``TableRow``.
        unit: see ``KernelWeights``.

    Returns:
        ``q_MN`` in float8_e4m3fn, defined like ``h_MN``, and float32 ``scale_M``.
    """
    return _launch(h_MN, 0, ids_M, table_E4, unit)


def _launch(
    x: Tensor, columns: int, ids_M: Tensor | None, table_E4: Tensor | None, unit: int
) -> tuple[Tensor, Tensor]:
    quantized, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)
    quantize_kernel[(len(x),)](
        *(x, ids_M, table_E4, quantized, scale, columns, x.stride(0)),
        OF_EXPERTS=ids_M is not None,
        NUM_EXPERTS=0 if table_E4 is None else len(table_E4),
        UNIT=unit,
        # a rank without channels of any expert still adds their biases
        BLOCK_A=min(MAX_BLOCK, next_power_of_2(max(1, x.shape[1]))),
        **launch_options(x.device),
    )
    return quantized, scale
