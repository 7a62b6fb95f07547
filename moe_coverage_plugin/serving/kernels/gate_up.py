"""Gate and up projection of routed pairs, and the activation between them."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import activated, along_rows, along_tokens, rounded
from moe_coverage_plugin.serving.kernels.products import product, tile_and_block


@triton.jit(do_not_specialize=["pairs", "tiles", "blocks_n"])
def gate_up_kernel(
    x_ptr, token_scale_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, table_ptr, expert_of_tile_ptr, sorted_ptr,
    routing_weight_ptr, h_ptr,
    pairs, tiles, hidden, blocks_n, h_stride,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, UNIT: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """``act(gate(x)) * up(x)`` of one tile of pairs, for ``BLOCK_N`` channels of its expert.

    The grid is all ``tiles`` times all ``blocks_n`` of the widest expert; programs without work leave at once.
    Channels from the width up to whole units are written as zeros, nothing beyond them.

    Args:
        x_ptr: ``[tokens, hidden]``, in the type of weights unless these are packed.
        token_scale_ptr: float32 ``[tokens]``, where ``x_ptr`` holds 8-bit floats.
        w_ptr, scale_ptr, zero_ptr, bias_ptr, table_ptr: ``w13`` and its like, see ``KernelWeights``.
        expert_of_tile_ptr, sorted_ptr: see ``Routing``; if ``DIRECT``, the experts of pairs, each pair its own tile.
        routing_weight_ptr: ``[pairs]``, read if ``WEIGHT_ON_INPUT``.
        h_ptr: ``[pairs, h_stride]``.
        GROUP: tiles that share a block of weights one after the other, while the cache holds it.
    """
    tile, block_n = tile_and_block(tl.program_id(0), tiles, blocks_n, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    width = tl.load(table_ptr + expert * 4).to(tl.int32)
    stored = (width + UNIT - 1) // UNIT * UNIT
    if block_n * BLOCK_N >= stored:
        return
    slot_M = tl.arange(0, BLOCK_M)
    pair_M = tl.where(slot_M == 0, tile, pairs) if DIRECT else tl.load(sorted_ptr + tile * BLOCK_M + slot_M)
    live_M = pair_M < pairs
    weight_M = slot_M
    if WEIGHT_ON_INPUT:
        weight_M = tl.load(routing_weight_ptr + pair_M, mask=live_M, other=0.0).to(tl.float32)
    row_R = _rows(block_n, width, stored, BITS, BLOCK_N)
    scales = _scale(scale_ptr, table_ptr, expert, hidden, BITS, GROUP_SIZE, UNIT) if BITS != 16 else w_ptr
    acc = product(
        (x_ptr + (pair_M // TOP_K).to(tl.int64) * hidden)[:, None],
        live_M,
        weight_M,
        _matrix(w_ptr, table_ptr, expert, hidden, BITS, UNIT),
        scales,
        _scale(zero_ptr, table_ptr, expert, hidden, BITS, GROUP_SIZE, UNIT) if HAS_ZERO else w_ptr,
        row_R,
        block_n * BLOCK_N * 2,
        stored * 2,
        hidden,
        BITS, GROUP_SIZE, HAS_ZERO, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN_K, WEIGHT_ON_INPUT and BITS != 8, SWAP, FAST,
    )  # fmt: skip
    if BITS == 8:
        token_M = tl.load(token_scale_ptr + pair_M // TOP_K, mask=live_M, other=0.0)
        # the scale of a token grows as the token does
        token_M = token_M * weight_M if WEIGHT_ON_INPUT else token_M
        acc *= along_rows(tl.load(scales + row_R).to(tl.float32), SWAP) * along_tokens(token_M, SWAP)
    if HAS_BIAS:
        acc += along_rows(_bias(bias_ptr, table_ptr, expert, block_n, width, BLOCK_N), SWAP)
    if SWAP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        h = tl.reshape(activated(gate, ACTIVATION) * up, (BLOCK_N, BLOCK_M))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 8, 2, 8)), (0, 1, 3, 2)))
        h = tl.reshape(activated(gate, ACTIVATION) * up, (BLOCK_M, BLOCK_N))
    n_N = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.where(along_rows(n_N < width, SWAP), h, 0.0)
    h_ptrs = along_tokens(h_ptr + pair_M.to(tl.int64) * h_stride, SWAP) + along_rows(n_N, SWAP)
    mask = along_tokens(live_M, SWAP) & along_rows(n_N < stored, SWAP)
    tl.store(h_ptrs, rounded(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matrix(w_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Where an expert's ``w13`` begins."""
    if BITS != 4:
        return w_ptr + tl.load(table_ptr + expert * 4 + 1) * 2 * hidden
    else:
        return w_ptr + tl.load(table_ptr + expert * 4 + 2) * (2 * UNIT) * ((hidden + 31) // 32 * 16)


@triton.jit
def _scale(scale_ptr, table_ptr, expert, hidden, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Where the scales of an expert's ``w13`` begin, or its zero points."""
    if BITS == 8:
        return scale_ptr + tl.load(table_ptr + expert * 4 + 1) * 2
    else:
        groups = 1 if GROUP_SIZE == 0 else hidden // GROUP_SIZE
        return scale_ptr + tl.load(table_ptr + expert * 4 + 2) * (2 * UNIT) * groups


@triton.jit
def _rows(block_n, width, stored, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of ``w13`` for a block of channels: eight of the gate, the same eight of up, and so on.

    So one product serves both, and each thread holds both of a channel. Packed rows lie in that order.
    """
    row = tl.arange(0, 2 * BLOCK_N)
    if BITS != 4:
        channel = tl.minimum(block_n * BLOCK_N + row // 16 * 8 + row % 8, width - 1)
        return row // 8 % 2 * width + channel
    else:
        return tl.minimum(block_n * BLOCK_N * 2 + row, 2 * stored - 1)


@triton.jit
def _bias(bias_ptr, table_ptr, expert, block_n, width, BLOCK_N: tl.constexpr):
    """Biases in the order of ``_rows``."""
    places = bias_ptr + tl.load(table_ptr + expert * 4 + 1) * 2 + _rows(block_n, width, width, 16, BLOCK_N)
    return tl.load(places).to(tl.float32)
