"""Down projection of routed pairs, and the sum of a token's pairs."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import along_rows, along_tokens, rounded
from moe_coverage_plugin.serving.kernels.products import product, product_of_slots, tile_and_block


@triton.jit(do_not_specialize=["pairs", "tiles", "blocks_n"])
def down_kernel(
    h_ptr, pair_scale_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, table_ptr, expert_of_tile_ptr, sorted_ptr,
    routing_weight_ptr, z_ptr,
    pairs, tiles, hidden, blocks_n, h_stride,
    WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Routing weight times ``down(h)`` of one tile of pairs, for ``BLOCK_N`` channels of the output.

    The grid is all ``tiles`` times all ``blocks_n``; unused tiles leave at once, and pairs without a tile are not
    written.

    Args:
        h_ptr: ``[pairs, h_stride]``, zero from an expert's width up to whole units, in the type of weights unless
            these are packed.
        pair_scale_ptr: float32 ``[pairs]``, where ``h_ptr`` holds 8-bit floats.
        w_ptr, scale_ptr, zero_ptr, bias_ptr, table_ptr: ``w2`` and its like, see ``KernelWeights``.
        expert_of_tile_ptr, sorted_ptr: see ``Routing``.
        routing_weight_ptr: ``[pairs]``, read unless ``WEIGHT_ON_INPUT``.
        z_ptr: ``[pairs, hidden]``.
    """
    tile, block_n = tile_and_block(tl.program_id(0), tiles, blocks_n, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    width = tl.load(table_ptr + expert * 4).to(tl.int32)
    pair_M = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    live_M = pair_M < pairs
    n_N = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_N = tl.minimum(n_N, hidden - 1)
    scales = _scale(scale_ptr, table_ptr, expert, hidden, BITS) if BITS != 16 else w_ptr
    z = product(
        (h_ptr + pair_M.to(tl.int64) * h_stride)[:, None],
        live_M,
        pair_M,
        _matrix(w_ptr, table_ptr, expert, hidden, BITS, UNIT),
        scales,
        _scale(zero_ptr, table_ptr, expert, hidden, BITS) if HAS_ZERO else w_ptr,
        row_N,
        block_n * BLOCK_N,
        _whole_rows(hidden),
        (width + UNIT - 1) // UNIT * UNIT,
        BITS, GROUP_SIZE, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False, SWAP, FAST,
    )  # fmt: skip
    if BITS == 8:
        # an expert without channels, which may have a bias to add, has no scales
        scale_N = tl.load(scales + row_N, mask=row_N < tl.where(width > 0, hidden, 0), other=0.0).to(tl.float32)
        pair_scale_M = tl.load(pair_scale_ptr + pair_M, mask=live_M, other=0.0)
        z *= along_rows(scale_N, SWAP) * along_tokens(pair_scale_M, SWAP)
    if HAS_BIAS:
        z += along_rows(tl.load(bias_ptr + expert * hidden + row_N).to(tl.float32), SWAP)
    if not WEIGHT_ON_INPUT:
        weight_M = tl.load(routing_weight_ptr + pair_M, mask=live_M, other=0.0)
        z *= along_tokens(weight_M.to(tl.float32), SWAP)
    z_ptrs = along_tokens(z_ptr + pair_M.to(tl.int64) * hidden, SWAP) + along_rows(n_N, SWAP)
    mask = along_tokens(live_M, SWAP) & along_rows(n_N < hidden, SWAP)
    tl.store(z_ptrs, rounded(z, z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    z_ptr, table_ptr, ids_ptr, y_ptr, hidden, TOP_K: tl.constexpr, MIN_WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of a token's pairs in float32, in the order of its slots; pairs that were given no tile count as zero.

    Args:
        z_ptr: ``[tokens * TOP_K, hidden]``.
        table_ptr, ids_ptr: experts' table and the experts of pairs.
        y_ptr: ``[tokens, hidden]``.
        MIN_WIDTH: width from which on pairs have tiles, as in ``route``.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = (token * TOP_K + slot).to(tl.int64)
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        width = tl.load(table_ptr + expert * 4, mask=expert >= 0, other=-1)
        limit = tl.where(width >= MIN_WIDTH, hidden, 0)
        total += tl.load(z_ptr + pair * hidden + column, mask=column < limit, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + token.to(tl.int64) * hidden + column
    tl.store(y_ptrs, rounded(total, y_ptr.dtype.element_ty), mask=column < hidden)


@triton.jit(do_not_specialize=["blocks_n"])
def down_decode_kernel(
    h_ptr, pair_scale_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, table_ptr, ids_ptr, routing_weight_ptr, y_ptr,
    hidden, blocks_n, h_stride,
    TOP_K: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, UNIT: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` channels of one token's output: the weighted sum over its experts, all taken at once.

    Arguments are those of ``down_kernel``; ``ids_ptr`` holds the experts of pairs, ``y_ptr`` is ``[tokens, hidden]``,
    ``SLOTS`` is ``TOP_K`` or the next power of two.
    """
    token, block_n = tl.program_id(0) // blocks_n, tl.program_id(0) % blocks_n
    n_N = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_N = tl.minimum(n_N, hidden - 1)
    slot_S = tl.arange(0, SLOTS)
    pair_S = token * TOP_K + slot_S
    chosen_S = tl.load(ids_ptr + pair_S, mask=slot_S < TOP_K, other=-1).to(tl.int64)
    expert_S = tl.maximum(chosen_S, 0)
    # an expert that is not there has no channels to go through
    width_S = tl.load(table_ptr + expert_S * 4, mask=chosen_S >= 0, other=0).to(tl.int32)
    scale_ptr_S = _scale(scale_ptr, table_ptr, expert_S, hidden, BITS) if BITS != 16 else slot_S
    sum_SN = product_of_slots(
        h_ptr + pair_S.to(tl.int64) * h_stride,
        _matrix(w_ptr, table_ptr, expert_S, hidden, BITS, UNIT),
        scale_ptr_S,
        _scale(zero_ptr, table_ptr, expert_S, hidden, BITS) if HAS_ZERO else slot_S,
        row_N,
        block_n * BLOCK_N,
        _whole_rows(hidden),
        (width_S + UNIT - 1) // UNIT * UNIT,
        BITS, GROUP_SIZE, HAS_ZERO, SLOTS, BLOCK_N, BLOCK_K, FAST, STAGES,
    )  # fmt: skip
    if BITS == 8:
        alive = row_N[None, :] < tl.where(width_S > 0, hidden, 0)[:, None]
        scale_SN = tl.load(scale_ptr_S[:, None] + row_N[None, :], mask=alive, other=0.0).to(tl.float32)
        pair_scale_S = tl.load(pair_scale_ptr + pair_S, mask=slot_S < TOP_K, other=0.0)
        sum_SN *= scale_SN * pair_scale_S[:, None]
    if HAS_BIAS:
        sum_SN += tl.load(bias_ptr + (expert_S * hidden)[:, None] + row_N[None, :]).to(tl.float32)
    if not WEIGHT_ON_INPUT:
        weight_S = tl.load(routing_weight_ptr + pair_S, mask=slot_S < TOP_K, other=0.0).to(tl.float32)
        sum_SN *= weight_S[:, None]
    y = tl.sum(tl.where(chosen_S[:, None] < 0, 0.0, sum_SN), axis=0)
    y_ptrs = y_ptr + token.to(tl.int64) * hidden + n_N
    tl.store(y_ptrs, rounded(y, y_ptr.dtype.element_ty), mask=n_N < hidden)


@triton.jit
def _whole_rows(hidden):
    """Rows of a packed ``w2``."""
    return (hidden + 15) // 16 * 16


@triton.jit
def _matrix(w_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Where an expert's ``w2`` begins."""
    unit = tl.load(table_ptr + expert * 4 + 2)
    if BITS != 4:
        return w_ptr + unit * UNIT * hidden
    else:
        return w_ptr + unit * (UNIT // 2) * _whole_rows(hidden)


@triton.jit
def _scale(scale_ptr, table_ptr, expert, hidden, BITS: tl.constexpr):
    """Where the scales of an expert's ``w2`` begin, or its zero points."""
    return scale_ptr + tl.load(table_ptr + expert * 4 + 3) * (hidden if BITS == 8 else _whole_rows(hidden))
