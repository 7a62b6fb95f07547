"""Products of tokens with rows of weights over all input channels: the inner loops of both projections."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import (
    accumulator,
    along_rows,
    dot_tokens,
    nibbles,
    rounded,
    scaled,
    settled,
    shifted,
)


@triton.jit
def product(
    x_ptrs_M1, live_M, weight_M, w_ptr, scale_ptr, zero_ptr, row_R, first_row, rows, channels,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, WEIGHTED: tl.constexpr, SWAP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of one expert's matrix times ``BLOCK_M`` tokens; of 8-bit floats, not scaled.

    Args:
        x_ptrs_M1: where each token's activations begin.
        live_M: which places hold a token; others are not read, and their products are zero.
        weight_M: factor of each token's activations, if ``WEIGHTED``; the product is rounded to their type.
        w_ptr, scale_ptr, zero_ptr: where the matrix, its scales and its zero points begin, of which none need exist.
        row_R: rows of a plain matrix; none beyond the last.
        first_row: the first row of a packed matrix, which are read in sequence; a multiple of 16.
        rows: of the packed matrix.
        channels: input channels, which is the distance of rows in a plain matrix.
        EVEN_K: whether ``BLOCK_K`` divides ``channels``.

    Returns:
        float32 in the orientation of ``dot_tokens``.
    """
    acc = accumulator(BLOCK_M, ROWS, SWAP)
    if BITS != 4:
        column = tl.arange(0, BLOCK_K)
        w_ptrs = (w_ptr + row_R * channels)[:, None]
        for k in range(0, channels, BLOCK_K):
            x = _tokens(x_ptrs_M1, live_M, k + column, channels, weight_M, EVEN_K, WEIGHTED)
            acc = dot_tokens(_plain(w_ptrs, k + column, channels, EVEN_K), x, acc, SWAP)
            if WEIGHTED and not SWAP:
                acc = settled(acc)
    else:
        DTYPE: tl.constexpr = x_ptrs_M1.dtype.element_ty
        column = _chunk_columns(BLOCK_K)
        w_ptrs = _packed_ptrs(w_ptr, first_row, rows, channels, ROWS, BLOCK_K)
        # in bytes of eight rows: 4 for each channel
        for k4 in range(0, 4 * channels, 4 * BLOCK_K):
            k = k4 // 4
            x = _tokens(x_ptrs_M1, live_M, k + column, channels, weight_M, EVEN_K, WEIGHTED)
            w = _unpacked(_packed(w_ptrs, k4, channels, EVEN_K, BLOCK_K), DTYPE, FAST, ROWS, BLOCK_K)
            if HAS_ZERO:
                w = shifted(w, _scales(zero_ptr, first_row, rows, k, channels, GROUP_SIZE, ROWS, BLOCK_K), FAST)
            if GROUP_SIZE > 0:
                # weights are scaled, not sums: the compiler only loads ahead what a dot product takes
                scale = _scales(scale_ptr, first_row, rows, k, channels, GROUP_SIZE, ROWS, BLOCK_K)
                w = scaled(w, scale, FAST)
            acc = dot_tokens(w, x, acc, SWAP)
            if SWAP or WEIGHTED:
                acc = settled(acc)
        if GROUP_SIZE == 0:  # noqa: SIM102  # decided when compiling, what follows is not
            # a rank that holds none of an expert's channels has no scales of it
            if channels > 0:
                acc *= along_rows(_scales_of_rows(scale_ptr, first_row, rows, ROWS).to(tl.float32), SWAP)
    return acc


@triton.jit
def product_of_slots(
    x_ptr_S, w_ptr_S, scale_ptr_S, zero_ptr_S, row_R, first_row, rows, channels_S,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``product`` for a single token per matrix, of several experts at once, without dot products.

    Everything is multiplied and summed in float32, 8-bit floats not scaled. All experts' weights are on their way at
    the same time.

    Args:
        x_ptr_S: where each expert's activations begin.
        w_ptr_S, scale_ptr_S, zero_ptr_S: where the experts' matrices, scales and zero points begin.
        row_R, first_row, rows: as in ``product``, the same of each matrix.
        channels_S: input channels; 0, the product is zero.
        STAGES: of the software pipeline, which by itself the compiler makes for dot products only.

    Returns:
        float32 ``[SLOTS, ROWS]``.
    """
    column = tl.arange(0, BLOCK_K)
    last = tl.max(channels_S)
    if BITS != 4:
        w_ptrs = w_ptr_S[:, None, None] + row_R[None, :, None] * channels_S[:, None, None] + column[None, None, :]
        acc_SRK = tl.zeros((SLOTS, ROWS, BLOCK_K), dtype=tl.float32)
        for k in tl.range(0, last, BLOCK_K, num_stages=STAGES):
            x_SK = _slots(x_ptr_S, k + column, channels_S)
            inside = (k + column)[None, None, :] < channels_S[:, None, None]
            w = tl.load(w_ptrs + k, mask=inside, other=0.0)
            acc_SRK += w.to(tl.float32) * x_SK[:, None, :]
        return tl.sum(acc_SRK, axis=2)
    else:
        DTYPE: tl.constexpr = x_ptr_S.dtype.element_ty
        CHUNKS: tl.constexpr = BLOCK_K // 32
        chunk, byte = tl.arange(0, CHUNKS), tl.arange(0, 4 * BLOCK_K)
        block_B = tl.minimum(first_row // 8 + tl.arange(0, ROWS // 8), rows // 8 - 1)
        bytes_S = (channels_S + 31) // 32 * 128
        w_ptrs = w_ptr_S[:, None, None] + block_B[None, :, None] * bytes_S[:, None, None] + byte[None, None, :]
        place_R = _place_of_scale(row_R)
        place_BI = tl.reshape(place_R, (ROWS // 8, 8))
        place_SBCI = place_BI[None, :, None, :]
        # a sum per chunk, so that a chunk's scale is read once
        acc = tl.zeros((SLOTS, ROWS // 8, CHUNKS, 8), dtype=tl.float32)
        for k4 in tl.range(0, 4 * last, 4 * BLOCK_K, num_stages=STAGES):
            k = k4 // 4
            x_SK = _slots(x_ptr_S, k + column, channels_S)
            x_low, x_high = _in_order_of_bytes(x_SK, SLOTS, CHUNKS)
            inside = (k4 + byte)[None, None, :] < bytes_S[:, None, None]
            packed = tl.load(w_ptrs + k4, mask=inside, other=0)
            low, high = nibbles(packed, DTYPE, FAST)
            low = tl.reshape(low, (SLOTS, ROWS // 8, CHUNKS, 8, 16)).to(tl.float32)
            high = tl.reshape(high, (SLOTS, ROWS // 8, CHUNKS, 8, 16)).to(tl.float32)
            part = tl.sum(low * x_low[:, None, :, None, :] + high * x_high[:, None, :, None, :], axis=4)
            channel = k + chunk * 32
            inside = channel[None, None, :, None] < channels_S[:, None, None, None]
            places = place_SBCI
            if GROUP_SIZE > 0:
                places += (channel // GROUP_SIZE * rows)[None, None, :, None]
            if HAS_ZERO:
                # what a weight lacks of its value is the same for all of a chunk
                zero = tl.load(zero_ptr_S[:, None, None, None] + places, mask=inside, other=0.0).to(tl.float32)
                part -= zero * tl.sum(x_low + x_high, axis=2)[:, None, :, None]
            if GROUP_SIZE > 0:
                scale = tl.load(scale_ptr_S[:, None, None, None] + places, mask=inside, other=0.0)
                part *= scale.to(tl.float32)
            acc += part
        sum_SR = tl.reshape(tl.sum(acc, axis=2), (SLOTS, ROWS))
        if GROUP_SIZE == 0:
            inside = (row_R * 0)[None, :] < channels_S[:, None]
            sum_SR *= tl.load(scale_ptr_S[:, None] + place_R[None, :], mask=inside, other=0.0).to(tl.float32)
        return sum_SR


@triton.jit
def tile_and_block(program, tiles, blocks_n, GROUP: tl.constexpr):
    """A program's tile of tokens and block of channels: ``GROUP`` tiles go through all blocks together."""
    group = program // (GROUP * blocks_n)
    first = group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = program % (GROUP * blocks_n)
    return first + within % size, within // size


@triton.jit
def _tokens(x_ptrs_M1, live_M, column_K, channels, weight_M, EVEN_K: tl.constexpr, WEIGHTED: tl.constexpr):
    """Activations ``[BLOCK_M, BLOCK_K]``, zero in empty places and from column ``channels`` on."""
    # empty places must not read some other token's: all programs at once would want the same few lines of the cache
    mask = live_M[:, None]
    if not EVEN_K:
        mask &= (column_K < channels)[None, :]
    x = tl.load(x_ptrs_M1 + column_K[None, :], mask=mask, other=0.0)
    if WEIGHTED:
        x = rounded(x.to(tl.float32) * weight_M[:, None], x.dtype)
    return x


@triton.jit
def _slots(x_ptr_S, column_K, channels_S):
    """Activations ``[SLOTS, BLOCK_K]`` in float32, zero from column ``channels_S`` on."""
    mask = column_K[None, :] < channels_S[:, None]
    return tl.load(x_ptr_S[:, None] + column_K[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _plain(w_ptrs_R1, column_K, channels, EVEN_K: tl.constexpr):
    """Plain weights ``[ROWS, BLOCK_K]``, zero from column ``channels`` on."""
    if EVEN_K:
        return tl.load(w_ptrs_R1 + column_K[None, :])
    else:
        return tl.load(w_ptrs_R1 + column_K[None, :], mask=(column_K < channels)[None, :], other=0.0)


@triton.jit
def _packed_ptrs(w_ptr, first_row, rows, channels, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the bytes of one step are, ``[ROWS / 8, 4 * BLOCK_K]``: blocks of eight rows, 128 bytes to a chunk."""
    block = tl.minimum(first_row // 8 + tl.arange(0, ROWS // 8), rows // 8 - 1)
    return w_ptr + (block * ((channels + 31) // 32 * 128))[:, None] + tl.arange(0, 4 * BLOCK_K)[None, :]


@triton.jit
def _packed(w_ptrs, k4, channels, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes of the step at channel ``k4 / 4``. What lies beyond the last chunk meets activations that are zero."""
    if EVEN_K:
        return tl.load(w_ptrs + k4)
    else:
        inside = k4 + tl.arange(0, 4 * BLOCK_K) < (channels + 31) // 32 * 128
        return tl.load(w_ptrs + k4, mask=inside[None, :], other=0)


@triton.jit
def _unpacked(packed, DTYPE: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Unscaled weights ``[ROWS, BLOCK_K]``, in the order of ``_chunk_columns``.

    Bytes lie as the threads of a warp hold the left operand of a matrix instruction, four bytes each in a block of
    eight rows by 16 columns: this moves nothing between threads.
    """
    low, high = nibbles(packed, DTYPE, FAST)
    # blocks of rows, chunks, rows, threads of a row, halves of eight columns, pairs, low or high
    parts = tl.reshape(tl.join(low, high), (ROWS // 8, BLOCK_K // 32, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 6, 1, 4, 3, 5)), (ROWS, BLOCK_K))


@triton.jit
def _chunk_columns(BLOCK_K: tl.constexpr):
    """Channels of a step over packed weights: the low halves of all its chunks, then the high ones."""
    column = tl.arange(0, BLOCK_K)
    return column // 16 % (BLOCK_K // 32) * 32 + column // (BLOCK_K // 2) * 16 + column % 16


@triton.jit
def _in_order_of_bytes(x_SK, SLOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Activations for low and for high nibbles, ``[SLOTS, CHUNKS, 16]`` each."""
    parts = tl.permute(tl.reshape(x_SK, (SLOTS, CHUNKS, 2, 2, 4, 2)), (0, 1, 4, 3, 5, 2))
    return tl.split(tl.reshape(parts, (SLOTS, CHUNKS, 16, 2)))


@triton.jit
def _place_of_scale(row):
    """Where a row's scale lies within a group: rows 8 apart lie together."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2


@triton.jit
def _scales(
    scale_ptr, first_row, rows, k, channels, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Scales, or zero points, of the step at channel ``k``: ``[ROWS, BLOCK_K]`` in the order of ``_unpacked``."""
    if GROUP_SIZE == 0:
        return tl.broadcast_to(_scales_of_rows(scale_ptr, first_row, rows, ROWS)[:, None], (ROWS, BLOCK_K))
    elif GROUP_SIZE % BLOCK_K == 0:
        scale_R = _scales_of_rows(scale_ptr + k // GROUP_SIZE * rows, first_row, rows, ROWS)
        return tl.broadcast_to(scale_R[:, None], (ROWS, BLOCK_K))
    else:
        CHUNKS: tl.constexpr = BLOCK_K // 32
        channel = k + tl.arange(0, CHUNKS) * 32
        # what lies beyond the last channel meets activations that are zero
        group_C = tl.minimum(channel, channels - 1) // GROUP_SIZE
        scale_RC = _scales_of_groups(scale_ptr, group_C, first_row, rows, ROWS, CHUNKS)
        spread = tl.broadcast_to(scale_RC[:, None, :, None], (ROWS, 2, CHUNKS, 16))
        return tl.reshape(spread, (ROWS, BLOCK_K))


@triton.jit
def _scales_of_rows(scale_ptr, first_row, rows, ROWS: tl.constexpr):
    """Scales ``[ROWS]`` of one group. Rows beyond the last have those of others."""
    if scale_ptr.dtype.element_ty.primitive_bitwidth == 32:
        row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1)
        return tl.load(scale_ptr + _place_of_scale(row))
    else:
        low, high = _halves(scale_ptr, _word(first_row, rows, ROWS))
        pairs = tl.reshape(tl.join(low, high), (ROWS // 16, 8, 2))
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), (ROWS,))


@triton.jit
def _scales_of_groups(scale_ptr, group_C, first_row, rows, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """``_scales_of_rows`` of several groups, ``[ROWS, CHUNKS]``."""
    if scale_ptr.dtype.element_ty.primitive_bitwidth == 32:
        row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1)
        return tl.load(scale_ptr + _place_of_scale(row)[:, None] + (group_C * rows)[None, :])
    else:
        word = _word(first_row, rows, ROWS)[:, None] + (group_C * (rows // 2))[None, :]
        low, high = _halves(scale_ptr, word)
        pairs = tl.reshape(tl.join(low, high), (ROWS // 16, 8, CHUNKS, 2))
        return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (ROWS, CHUNKS))


@triton.jit
def _word(first_row, rows, ROWS: tl.constexpr):
    """Words of two 16-bit scales."""
    return tl.minimum(first_row // 2 + tl.arange(0, ROWS // 2), rows // 2 - 1)


@triton.jit
def _halves(scale_ptr, word):
    """Two 16-bit scales of each word: the compiler loads nothing ahead that is narrower than a word."""
    DTYPE: tl.constexpr = scale_ptr.dtype.element_ty
    words = tl.load(scale_ptr.to(tl.pointer_type(tl.uint32)) + word)
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return low, high
