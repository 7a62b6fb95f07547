"""Down projection of routed rows, and the sum over the slots of each token."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import expand_m, expand_o, round_to
from moe_coverage_plugin.serving.kernels.dependent_launch import wait_for_previous_kernel
from moe_coverage_plugin.serving.kernels.expert_table import (
    COLUMNS,
    FIRST_GROUP,
    FIRST_UNIT,
    WIDTH,
    known_expert,
    load_column,
)
from moe_coverage_plugin.serving.kernels.gemv import gemv_slots
from moe_coverage_plugin.serving.kernels.matmul import matmul_tile, tile_of_program


@triton.jit(do_not_specialize=["num_pairs", "num_tiles_m", "num_tiles_n"])
def down_kernel(
    h_ptr, h_scale_ptr, w_ptr, w_scale_ptr, w_zero_point_ptr, bias_ptr, table_ptr, expert_of_tile_ptr,
    sorted_pairs_ptr, routing_weight_ptr, z_ptr,
    num_pairs, num_tiles_m, hidden, num_tiles_n, h_stride,
    WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINT: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP_AB: tl.constexpr, PROMOTE: tl.constexpr, INLINE_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``z[m] = routing_weight[m] * down_proj(h[m])`` with the weights of the pair's expert.

    Grid: ``num_tiles_m * num_tiles_n`` programs. Each computes ``BLOCK_M`` pairs of one expert by ``BLOCK_N`` channels
    of the hidden state. Programs of unused tiles return at once, so pairs without a tile are not written.

    Numerics: accumulated in float32, see ``matmul_tile``. Scales of 8-bit floats, then the bias, then the routing
    weight are applied in float32; ``z`` is rounded once to its dtype, which may be float32.

    Tested against ``core.ragged.reference_moe`` together with the gate and up projection.

    Pointers:
        h_ptr: ``[num_pairs, h_stride]`` in the dtype of the weights, or in that of the scales of packed weights; zero
            from an expert's width up to a multiple of ``UNIT``.
        h_scale_ptr: float32 ``[num_pairs]`` if ``BITS`` is 8.
        w_ptr: ``w2`` of ``KernelWeights``.
        w_scale_ptr: scales of packed and of 8-bit weights.
        w_zero_point_ptr: zero points if ``HAS_ZERO_POINT``.
        bias_ptr: biases if ``HAS_BIAS``.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        expert_of_tile_ptr: int32 ``[num_tiles_m]``, see ``Routing``.
        sorted_pairs_ptr: int32 ``[num_tiles_m * BLOCK_M]``, see ``Routing``.
        routing_weight_ptr: floating ``[num_pairs]``, read unless ``WEIGHT_ON_INPUT``.
        z_ptr: ``[num_pairs, hidden]``, written in its own dtype.
    """
    wait_for_previous_kernel(PDL)
    tile_m, tile_n = tile_of_program(tl.program_id(0), num_tiles_m, num_tiles_n, GROUP_M)
    expert = tl.load(expert_of_tile_ptr + tile_m).to(tl.int64)
    if expert < 0:
        return
    width = load_column(table_ptr, expert, WIDTH).to(tl.int32)
    pair_M = tl.load(sorted_pairs_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    mask_M = pair_M < num_pairs
    channel_H = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_H = tl.minimum(channel_H, hidden - 1)
    scales = _w2_scale_ptr(w_scale_ptr, table_ptr, expert, hidden, BITS) if BITS != 16 else w_ptr
    z = matmul_tile(
        (h_ptr + pair_M.to(tl.int64) * h_stride)[:, None],
        mask_M,
        pair_M,
        _w2_ptr(w_ptr, table_ptr, expert, hidden, BITS, UNIT),
        scales,
        _w2_scale_ptr(w_zero_point_ptr, table_ptr, expert, hidden, BITS) if HAS_ZERO_POINT else w_ptr,
        row_H,
        tile_n * BLOCK_N,
        _padded_rows(hidden),
        (width + UNIT - 1) // UNIT * UNIT,
        BITS, GROUP_SIZE, HAS_ZERO_POINT, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False, SWAP_AB, PROMOTE, INLINE_PTX,
    )  # fmt: skip
    if BITS == 8:
        # an expert without channels on this rank has no scales, but it may have a bias to add
        scale_H = tl.load(scales + row_H, mask=row_H < tl.where(width > 0, hidden, 0), other=0.0).to(tl.float32)
        h_scale_M = tl.load(h_scale_ptr + pair_M, mask=mask_M, other=0.0)
        z *= expand_o(scale_H, SWAP_AB) * expand_m(h_scale_M, SWAP_AB)
    if HAS_BIAS:
        z += expand_o(tl.load(bias_ptr + expert * hidden + row_H).to(tl.float32), SWAP_AB)
    if not WEIGHT_ON_INPUT:
        routing_weight_M = tl.load(routing_weight_ptr + pair_M, mask=mask_M, other=0.0)
        z *= expand_m(routing_weight_M.to(tl.float32), SWAP_AB)
    z_ptrs = expand_m(z_ptr + pair_M.to(tl.int64) * hidden, SWAP_AB) + expand_o(channel_H, SWAP_AB)
    mask = expand_m(mask_M, SWAP_AB) & expand_o(channel_H < hidden, SWAP_AB)
    tl.store(z_ptrs, round_to(z, z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    z_ptr, table_ptr, ids_ptr, y_ptr, hidden,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, MIN_WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``y[t] = sum over k of z[t * TOP_K + k]``; a pair without a tile counts as zero.

    Grid: ``(tokens, ceil(hidden / BLOCK_H))`` programs. Each sums ``BLOCK_H`` channels of one token in float32, slots
    in ascending order, and rounds once.

    Tested against ``core.ragged.reference_moe`` together with both projections.

    Pointers:
        z_ptr: floating ``[tokens * TOP_K, hidden]``; not read for pairs that count as zero.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        ids_ptr: integer ``[tokens * TOP_K]``, experts of pairs; numbers that no expert has, and experts narrower than
            ``MIN_WIDTH``, have no tile, see ``route``.
        y_ptr: ``[tokens, hidden]``, written in its own dtype.
    """
    wait_for_previous_kernel(PDL)
    token = tl.program_id(0)
    channel_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total_H = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = (token * TOP_K + slot).to(tl.int64)
        expert = known_expert(tl.load(ids_ptr + pair), NUM_EXPERTS)
        width = tl.load(table_ptr + expert * COLUMNS + WIDTH, mask=expert >= 0, other=-1)
        stop = tl.where(width >= MIN_WIDTH, hidden, 0)
        total_H += tl.load(z_ptr + pair * hidden + channel_H, mask=channel_H < stop, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + token.to(tl.int64) * hidden + channel_H
    tl.store(y_ptrs, round_to(total_H, y_ptr.dtype.element_ty), mask=channel_H < hidden)


@triton.jit(do_not_specialize=["num_tiles_n"])
def down_decode_kernel(
    h_ptr, h_scale_ptr, w_ptr, w_scale_ptr, w_zero_point_ptr, bias_ptr, table_ptr, ids_ptr, routing_weight_ptr, y_ptr,
    hidden, num_tiles_n, h_stride,
    TOP_K: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINT: tl.constexpr, UNIT: tl.constexpr,
    SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INLINE_PTX: tl.constexpr, NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``y[t] = sum over k of routing_weight[t, k] * down_proj(h[t, k])``: ``down_kernel`` and ``sum_kernel`` in one.

    Grid: ``tokens * num_tiles_n`` programs. Each computes ``BLOCK_N`` channels of one token's output from all of its
    slots at once.

    Numerics: all in float32 without tensor cores, see ``gemv_slots``; then scales of 8-bit floats, the bias, the
    routing weight and the sum over slots. ``y`` is rounded once. Slots whose number no expert has count as zero.

    Tested against ``core.ragged.reference_moe`` together with the gate and up projection.

    Pointers:
        h_ptr: ``[tokens * TOP_K, h_stride]``, as in ``down_kernel``.
        h_scale_ptr: float32 ``[tokens * TOP_K]`` if ``BITS`` is 8.
        w_ptr: ``w2`` of ``KernelWeights``.
        w_scale_ptr: scales of packed and of 8-bit weights.
        w_zero_point_ptr: zero points if ``HAS_ZERO_POINT``.
        bias_ptr: biases if ``HAS_BIAS``.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        ids_ptr: integer ``[tokens * TOP_K]``, experts of pairs.
        routing_weight_ptr: floating ``[tokens * TOP_K]``, read unless ``WEIGHT_ON_INPUT``.
        y_ptr: ``[tokens, hidden]``, written in its own dtype.

    Constants (others: see the package):
        SLOTS: ``TOP_K`` rounded up to a power of two.
        NUM_STAGES: stages of the software pipeline, see ``gemv_slots``.
    """
    wait_for_previous_kernel(PDL)
    token, tile_n = tl.program_id(0) // num_tiles_n, tl.program_id(0) % num_tiles_n
    channel_H = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_H = tl.minimum(channel_H, hidden - 1)
    slot_K = tl.arange(0, SLOTS)
    pair_K = token * TOP_K + slot_K
    id_K = known_expert(tl.load(ids_ptr + pair_K, mask=slot_K < TOP_K, other=-1), NUM_EXPERTS)
    expert_K = tl.maximum(id_K, 0)
    # a slot without an expert has width 0, so nothing of expert 0 is read for it
    width_K = tl.load(table_ptr + expert_K * COLUMNS + WIDTH, mask=id_K >= 0, other=0).to(tl.int32)
    scale_ptr_K = _w2_scale_ptr(w_scale_ptr, table_ptr, expert_K, hidden, BITS) if BITS != 16 else slot_K
    z_KH = gemv_slots(
        h_ptr + pair_K.to(tl.int64) * h_stride,
        _w2_ptr(w_ptr, table_ptr, expert_K, hidden, BITS, UNIT),
        scale_ptr_K,
        _w2_scale_ptr(w_zero_point_ptr, table_ptr, expert_K, hidden, BITS) if HAS_ZERO_POINT else slot_K,
        row_H,
        tile_n * BLOCK_N,
        _padded_rows(hidden),
        (width_K + UNIT - 1) // UNIT * UNIT,
        BITS, GROUP_SIZE, HAS_ZERO_POINT, SLOTS, BLOCK_N, BLOCK_K, INLINE_PTX, NUM_STAGES,
    )  # fmt: skip
    if BITS == 8:
        has_scale = row_H[None, :] < tl.where(width_K > 0, hidden, 0)[:, None]
        scale_KH = tl.load(scale_ptr_K[:, None] + row_H[None, :], mask=has_scale, other=0.0).to(tl.float32)
        h_scale_K = tl.load(h_scale_ptr + pair_K, mask=slot_K < TOP_K, other=0.0)
        z_KH *= scale_KH * h_scale_K[:, None]
    if HAS_BIAS:
        z_KH += tl.load(bias_ptr + (expert_K * hidden)[:, None] + row_H[None, :]).to(tl.float32)
    if not WEIGHT_ON_INPUT:
        routing_weight_K = tl.load(routing_weight_ptr + pair_K, mask=slot_K < TOP_K, other=0.0).to(tl.float32)
        z_KH *= routing_weight_K[:, None]
    y_H = tl.sum(tl.where(id_K[:, None] < 0, 0.0, z_KH), axis=0)
    y_ptrs = y_ptr + token.to(tl.int64) * hidden + channel_H
    tl.store(y_ptrs, round_to(y_H, y_ptr.dtype.element_ty), mask=channel_H < hidden)


@triton.jit
def _padded_rows(hidden):
    """Rows of a packed ``w2``: a multiple of 16."""
    return (hidden + 15) // 16 * 16


@triton.jit
def _w2_ptr(w_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Pointer to an expert's ``w2``."""
    first_unit = load_column(table_ptr, expert, FIRST_UNIT)
    if BITS != 4:
        return w_ptr + first_unit * UNIT * hidden
    else:
        return w_ptr + first_unit * (UNIT // 2) * _padded_rows(hidden)


@triton.jit
def _w2_scale_ptr(scale_ptr, table_ptr, expert, hidden, BITS: tl.constexpr):
    """Pointer to the scales or zero points of an expert's ``w2``."""
    return scale_ptr + load_column(table_ptr, expert, FIRST_GROUP) * (hidden if BITS == 8 else _padded_rows(hidden))
