"""Loads packed 4-bit weights, their scales and their zero points in the layout of ``repacking``.

A packed row holds 8 rows of the matrix; along the input features it consists of chunks of 32, 128 bytes each. A step
of a kernel covers ``BLOCK_N`` rows and ``BLOCK_K`` input features, whole chunks of them.
"""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.int4 import unpack_int4


@triton.jit
def packed_row_bytes(in_features):
    """Bytes of a packed row: 128 for each chunk that is begun."""
    return (in_features + 31) // 32 * 128


@triton.jit
def packed_ptrs(w_ptr, first_row, num_rows, in_features, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers to the bytes of the first step, ``[BLOCK_N / 8, 4 * BLOCK_K]``; rows beyond the last repeat it."""
    packed_row_O = tl.minimum(first_row // 8 + tl.arange(0, BLOCK_N // 8), num_rows // 8 - 1)
    return w_ptr + (packed_row_O * packed_row_bytes(in_features))[:, None] + tl.arange(0, 4 * BLOCK_K)[None, :]


@triton.jit
def load_packed(w_ptrs, byte, in_features, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the bytes of the step that begins at ``byte`` of its packed rows.

    The last chunk may hold padding, which is multiplied by activations that are zero.
    """
    if EVEN_K:
        return tl.load(w_ptrs + byte)
    else:
        mask = byte + tl.arange(0, 4 * BLOCK_K) < packed_row_bytes(in_features)
        return tl.load(w_ptrs + byte, mask=mask[None, :], other=0)


@triton.jit
def unpack_step(
    packed, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Weights ``[BLOCK_N, BLOCK_K]`` without scale and zero point, input features in the order of ``feature_order``.

    The bytes are stored in the order in which the threads of a warp hold the left operand of an ``mma`` instruction:
    a thread has four adjacent bytes of 8 rows by 32 input features. The order of the features is that in which Triton
    gives their columns to threads, so no value moves between threads.
    """
    low, high = unpack_int4(packed, DTYPE, INLINE_PTX)
    # packed rows, chunks, 8 rows, 4 threads of a row, 2 halves of 8 columns, 2 adjacent columns, low or high nibble
    parts = tl.reshape(tl.join(low, high), (BLOCK_N // 8, BLOCK_K // 32, 8, 4, 2, 2, 2))
    if NARROW:
        return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 6, 4, 5)), (BLOCK_N, BLOCK_K))
    else:
        return tl.reshape(tl.permute(parts, (0, 2, 6, 1, 4, 3, 5)), (BLOCK_N, BLOCK_K))


@triton.jit
def feature_order(BLOCK_K: tl.constexpr, NARROW: tl.constexpr):
    """Input features of a step in the order of ``unpack_step``.

    With ``NARROW``, the 8 features of each thread's four bytes follow each other. Otherwise the 16 of all chunks' low
    nibbles come first, then the 16 of all chunks' high nibbles.
    """
    feature_A = tl.arange(0, BLOCK_K)
    if NARROW:
        thread_A, high_A, half_A = feature_A // 8 % 4, feature_A // 4 % 2, feature_A // 2 % 2
        return feature_A // 32 * 32 + high_A * 16 + half_A * 8 + thread_A * 2 + feature_A % 2
    else:
        return feature_A // 16 % (BLOCK_K // 32) * 32 + feature_A // (BLOCK_K // 2) * 16 + feature_A % 16


@triton.jit
def scale_offset(row):
    """Offset of a row's scale within its quantization group: the scales of rows 8 apart are adjacent."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2


@triton.jit
def load_scales(
    scale_ptr, first_row, num_rows, k, in_features,
    GROUP_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Load the scales or zero points of the step at input feature ``k``, ``[BLOCK_N, BLOCK_K]`` like its weights."""
    if GROUP_SIZE == 0:
        scale_O = load_row_scales(scale_ptr, first_row, num_rows, True, BLOCK_N)
        return tl.broadcast_to(scale_O[:, None], (BLOCK_N, BLOCK_K))
    elif GROUP_SIZE % BLOCK_K == 0:
        scale_O = load_group_scales(scale_ptr, first_row, num_rows, k, True, GROUP_SIZE, BLOCK_N)
        return tl.broadcast_to(scale_O[:, None], (BLOCK_N, BLOCK_K))
    else:
        CHUNKS: tl.constexpr = BLOCK_K // 32
        chunk_A = k + tl.arange(0, CHUNKS) * 32
        # chunks beyond the last input feature are multiplied by activations that are zero
        group_A = tl.minimum(chunk_A, in_features - 1) // GROUP_SIZE
        scale_OA = _load_chunk_scales(scale_ptr, group_A, first_row, num_rows, BLOCK_N, CHUNKS)
        if NARROW:
            spread = tl.broadcast_to(scale_OA[:, :, None], (BLOCK_N, CHUNKS, 32))
        else:
            spread = tl.broadcast_to(scale_OA[:, None, :, None], (BLOCK_N, 2, CHUNKS, 16))
        return tl.reshape(spread, (BLOCK_N, BLOCK_K))


@triton.jit
def load_group_scales(scale_ptr, first_row, num_rows, k, exist, GROUP_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the scales ``[BLOCK_N]`` of the quantization group of input feature ``k``, see ``load_row_scales``."""
    return load_row_scales(scale_ptr + k // GROUP_SIZE * num_rows, first_row, num_rows, exist, BLOCK_N)


@triton.jit
def load_row_scales(scale_ptr, first_row, num_rows, exist, BLOCK_N: tl.constexpr):
    """Load the scales ``[BLOCK_N]`` of one quantization group; rows beyond the last get those of other rows.

    ``exist`` says whether there are any, which is not so for ``w2`` of an expert without channels on this rank; zero
    if not.
    """
    if scale_ptr.dtype.element_ty.primitive_bitwidth == 32:
        row_O = tl.minimum(first_row + tl.arange(0, BLOCK_N), num_rows - 1)
        return tl.load(scale_ptr + scale_offset(row_O), mask=exist, other=0.0)
    else:
        low, high = _load_scale_words(scale_ptr, _scale_word(first_row, num_rows, BLOCK_N), exist)
        pairs = tl.reshape(tl.join(low, high), (BLOCK_N // 16, 8, 2))
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_N,))


@triton.jit
def _load_chunk_scales(scale_ptr, group_A, first_row, num_rows, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """``load_row_scales`` for the quantization group of each chunk, ``[BLOCK_N, CHUNKS]``."""
    if scale_ptr.dtype.element_ty.primitive_bitwidth == 32:
        row_O = tl.minimum(first_row + tl.arange(0, BLOCK_N), num_rows - 1)
        return tl.load(scale_ptr + scale_offset(row_O)[:, None] + (group_A * num_rows)[None, :])
    else:
        word_OA = _scale_word(first_row, num_rows, BLOCK_N)[:, None] + (group_A * (num_rows // 2))[None, :]
        low, high = _load_scale_words(scale_ptr, word_OA, True)
        pairs = tl.reshape(tl.join(low, high), (BLOCK_N // 16, 8, CHUNKS, 2))
        return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (BLOCK_N, CHUNKS))


@triton.jit
def _scale_word(first_row, num_rows, BLOCK_N: tl.constexpr):
    """Indices of the 32-bit words that hold two adjacent 16-bit scales each."""
    return tl.minimum(first_row // 2 + tl.arange(0, BLOCK_N // 2), num_rows // 2 - 1)


@triton.jit
def _load_scale_words(scale_ptr, word, exist):
    """Load two 16-bit scales per word: Triton does not pipeline loads that are narrower than 32 bits."""
    DTYPE: tl.constexpr = scale_ptr.dtype.element_ty
    words = tl.load(scale_ptr.to(tl.pointer_type(tl.uint32)) + word, mask=exist, other=0)
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return low, high
