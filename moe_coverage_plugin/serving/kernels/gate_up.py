"""Gate and up projection of routed rows, and the activation between them."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import apply_activation, expand_m, expand_o, round_to
from moe_coverage_plugin.serving.kernels.dependent_launch import wait_for_previous_kernel
from moe_coverage_plugin.serving.kernels.expert_table import (
    FIRST_CHANNEL,
    FIRST_UNIT,
    WIDTH,
    known_expert,
    load_column,
)
from moe_coverage_plugin.serving.kernels.matmul import matmul_tile, tile_of_program


@triton.jit(do_not_specialize=["num_pairs", "num_tiles_m", "num_tiles_n"])
def gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, w_zero_point_ptr, bias_ptr, table_ptr, expert_of_tile_ptr,
    sorted_pairs_ptr, routing_weight_ptr, h_ptr,
    num_pairs, num_tiles_m, hidden, num_tiles_n, h_stride,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINT: tl.constexpr, UNIT: tl.constexpr,
    ONE_PAIR_PER_TILE: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP_AB: tl.constexpr, PROMOTE: tl.constexpr, INLINE_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[m] = act(gate_proj(x[token(m)])) * up_proj(x[token(m)])`` with the weights of the pair's expert.

    Grid: ``num_tiles_m * num_tiles_n`` programs. Each computes ``BLOCK_M`` pairs of one expert by ``BLOCK_N`` of its
    channels. ``num_tiles_n`` is that of the widest expert: programs of unused tiles and beyond an expert's width
    return at once. Channels from the width up to a multiple of ``UNIT`` are written as zeros, later ones not at all.

    Numerics: both projections are accumulated in float32, see ``matmul_tile``. Scales of 8-bit floats, then biases,
    the activation and the product are computed in float32, too; ``h`` is rounded once. The routing weight, if it is
    applied to the input, is multiplied into ``x`` and rounded to its dtype, but into the float32 scale of an 8-bit
    token.

    Tested against ``core.ragged.reference_moe`` together with the down projection.

    Pointers:
        x_ptr: ``[tokens, hidden]`` in the dtype of the weights, or in that of the scales of packed weights.
        x_scale_ptr: float32 ``[tokens]`` if ``BITS`` is 8.
        w_ptr: ``w13`` of ``KernelWeights``.
        w_scale_ptr: scales of packed and of 8-bit weights.
        w_zero_point_ptr: zero points if ``HAS_ZERO_POINT``.
        bias_ptr: biases if ``HAS_BIAS``.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        expert_of_tile_ptr: int32 ``[num_tiles_m]``, see ``Routing``; the experts of pairs if ``ONE_PAIR_PER_TILE``.
        sorted_pairs_ptr: int32 ``[num_tiles_m * BLOCK_M]``, see ``Routing``; not read if ``ONE_PAIR_PER_TILE``.
        routing_weight_ptr: floating ``[num_pairs]``, read if ``WEIGHT_ON_INPUT``.
        h_ptr: ``[num_pairs, h_stride]``, written in its own dtype.

    Constants (others: see the package):
        ONE_PAIR_PER_TILE: tile ``m`` consists of pair ``m`` alone, and the other ``BLOCK_M - 1`` rows are masked.
    """
    wait_for_previous_kernel(PDL)
    tile_m, tile_n = tile_of_program(tl.program_id(0), num_tiles_m, num_tiles_n, GROUP_M)
    expert = tl.load(expert_of_tile_ptr + tile_m).to(tl.int64)
    if ONE_PAIR_PER_TILE:
        expert = known_expert(expert, NUM_EXPERTS)
    if expert < 0:
        return
    width = load_column(table_ptr, expert, WIDTH).to(tl.int32)
    padded_width = (width + UNIT - 1) // UNIT * UNIT
    if tile_n * BLOCK_N >= padded_width:
        return
    index_M = tl.arange(0, BLOCK_M)
    if ONE_PAIR_PER_TILE:
        pair_M = tl.where(index_M == 0, tile_m, num_pairs)
    else:
        pair_M = tl.load(sorted_pairs_ptr + tile_m * BLOCK_M + index_M)
    mask_M = pair_M < num_pairs
    routing_weight_M = index_M
    if WEIGHT_ON_INPUT:
        routing_weight_M = tl.load(routing_weight_ptr + pair_M, mask=mask_M, other=0.0).to(tl.float32)
    row_O = _w13_rows(tile_n, width, padded_width, BITS, BLOCK_N)
    scales = _w13_scale_ptr(w_scale_ptr, table_ptr, expert, hidden, BITS, GROUP_SIZE, UNIT) if BITS != 16 else w_ptr
    acc = matmul_tile(
        (x_ptr + (pair_M // TOP_K).to(tl.int64) * hidden)[:, None],
        mask_M,
        routing_weight_M,
        _w13_ptr(w_ptr, table_ptr, expert, hidden, BITS, UNIT),
        scales,
        _w13_scale_ptr(w_zero_point_ptr, table_ptr, expert, hidden, BITS, GROUP_SIZE, UNIT)
        if HAS_ZERO_POINT else w_ptr,
        row_O,
        tile_n * BLOCK_N * 2,
        padded_width * 2,
        hidden,
        BITS, GROUP_SIZE, HAS_ZERO_POINT, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN_K, WEIGHT_ON_INPUT and BITS != 8,
        SWAP_AB, PROMOTE, INLINE_PTX,
    )  # fmt: skip
    if BITS == 8:
        x_scale_M = tl.load(x_scale_ptr + pair_M // TOP_K, mask=mask_M, other=0.0)
        # a token times a factor has the same 8-bit values and the scale times this factor
        x_scale_M = x_scale_M * routing_weight_M if WEIGHT_ON_INPUT else x_scale_M
        acc *= expand_o(tl.load(scales + row_O).to(tl.float32), SWAP_AB) * expand_m(x_scale_M, SWAP_AB)
    if HAS_BIAS:
        acc += expand_o(_load_w13_bias(bias_ptr, table_ptr, expert, tile_n, width, BLOCK_N), SWAP_AB)
    if SWAP_AB:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        h = tl.reshape(apply_activation(gate, ACTIVATION) * up, (BLOCK_N, BLOCK_M))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 8, 2, 8)), (0, 1, 3, 2)))
        h = tl.reshape(apply_activation(gate, ACTIVATION) * up, (BLOCK_M, BLOCK_N))
    channel_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.where(expand_o(channel_N < width, SWAP_AB), h, 0.0)
    h_ptrs = expand_m(h_ptr + pair_M.to(tl.int64) * h_stride, SWAP_AB) + expand_o(channel_N, SWAP_AB)
    mask = expand_m(mask_M, SWAP_AB) & expand_o(channel_N < padded_width, SWAP_AB)
    tl.store(h_ptrs, round_to(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _w13_ptr(w_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Pointer to an expert's ``w13``."""
    if BITS != 4:
        return w_ptr + load_column(table_ptr, expert, FIRST_CHANNEL) * 2 * hidden
    else:
        # two values per byte, rows padded to whole chunks of 32
        return w_ptr + load_column(table_ptr, expert, FIRST_UNIT) * (2 * UNIT) * ((hidden + 31) // 32 * 16)


@triton.jit
def _w13_scale_ptr(
    scale_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr
):
    """Pointer to the scales or zero points of an expert's ``w13``."""
    if BITS == 8:
        return scale_ptr + load_column(table_ptr, expert, FIRST_CHANNEL) * 2
    else:
        groups = 1 if GROUP_SIZE == 0 else hidden // GROUP_SIZE
        return scale_ptr + load_column(table_ptr, expert, FIRST_UNIT) * (2 * UNIT) * groups


@triton.jit
def _w13_rows(tile_n, width, padded_width, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of ``w13`` for a tile of channels: 8 of ``gate_proj``, the same 8 of ``up_proj``, and so on.

    In this order one matrix product computes both projections, and each thread holds both values of a channel. Packed
    rows are stored in this order.
    """
    row_O = tl.arange(0, 2 * BLOCK_N)
    if BITS != 4:
        channel_O = tl.minimum(tile_n * BLOCK_N + row_O // 16 * 8 + row_O % 8, width - 1)
        return row_O // 8 % 2 * width + channel_O
    else:
        return tl.minimum(tile_n * BLOCK_N * 2 + row_O, 2 * padded_width - 1)


@triton.jit
def _load_w13_bias(bias_ptr, table_ptr, expert, tile_n, width, BLOCK_N: tl.constexpr):
    """Load biases as float32 in the order of ``_w13_rows``; they are stored like plain weights."""
    expert_bias_ptr = bias_ptr + load_column(table_ptr, expert, FIRST_CHANNEL) * 2
    return tl.load(expert_bias_ptr + _w13_rows(tile_n, width, width, 16, BLOCK_N)).to(tl.float32)
