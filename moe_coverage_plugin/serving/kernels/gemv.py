"""``w @ x`` for the experts of all slots of one token at once: the inner loop of the down projection when decoding."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.int4 import unpack_int4
from moe_coverage_plugin.serving.kernels.packed_weights import packed_row_bytes, scale_offset


@triton.jit
def gemv_slots(
    x_ptr_K, w_ptr_K, scale_ptr_K, zero_point_ptr_K, row_O, first_row, num_rows, in_features_K,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` rows of each slot's matrix times the vector of activations of this slot.

    ``acc[k, o] = sum over a of x[k, a] * w[k, o, a]``. Values are converted to float32, then multiplied and summed
    without tensor cores: one partial sum per place in a step (of a chunk, for packed weights) over steps of
    ``BLOCK_K`` input features in ascending order, then the sum of these. With ``BITS`` 8, nothing is scaled. With
    ``BITS`` 4, the partial sum of each chunk is scaled, not rounded weights. The loads of all slots' weights are in
    flight at the same time.

    Operands:
        x_ptr_K: pointers to each slot's activations.
        w_ptr_K: pointers to each slot's matrix.
        scale_ptr_K: pointers to the scales of each slot's matrix if they are packed.
        zero_point_ptr_K: pointers to their zero points if ``HAS_ZERO_POINT``.
        row_O: rows of the matrices, the same for each slot; they must exist.
        first_row: first row of packed matrices; a multiple of 16.
        num_rows: rows of packed matrices.
        in_features_K: input features of each slot's matrix; for 0 the result is zero.

    Constants (others: see the package):
        SLOTS: number of slots, a power of two.
        NUM_STAGES: stages of the software pipeline, given to the loop because Triton by itself pipelines only loops
            with dot products.

    Returns:
        float32 ``[SLOTS, BLOCK_N]``.
    """
    feature_A = tl.arange(0, BLOCK_K)
    last = tl.max(in_features_K)
    if BITS != 4:
        w_ptrs = (
            w_ptr_K[:, None, None] + row_O[None, :, None] * in_features_K[:, None, None] + feature_A[None, None, :]
        )
        acc_KOA = tl.zeros((SLOTS, BLOCK_N, BLOCK_K), dtype=tl.float32)
        for k in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
            x_KA = _load_x_slots(x_ptr_K, k + feature_A, in_features_K)
            mask = (k + feature_A)[None, None, :] < in_features_K[:, None, None]
            w_KOA = tl.load(w_ptrs + k, mask=mask, other=0.0)
            acc_KOA += w_KOA.to(tl.float32) * x_KA[:, None, :]
        return tl.sum(acc_KOA, axis=2)
    else:
        DTYPE: tl.constexpr = x_ptr_K.dtype.element_ty
        CHUNKS: tl.constexpr = BLOCK_K // 32
        chunk_A, byte_A = tl.arange(0, CHUNKS), tl.arange(0, 4 * BLOCK_K)
        packed_row_O = tl.minimum(first_row // 8 + tl.arange(0, BLOCK_N // 8), num_rows // 8 - 1)
        row_bytes_K = packed_row_bytes(in_features_K)
        w_ptrs = (
            w_ptr_K[:, None, None] + packed_row_O[None, :, None] * row_bytes_K[:, None, None] + byte_A[None, None, :]
        )
        scale_offset_O = scale_offset(row_O)
        scale_offset_O8 = tl.reshape(scale_offset_O, (BLOCK_N // 8, 8))
        # slots, packed rows, chunks, rows of a packed row
        row_offsets = scale_offset_O8[None, :, None, :]
        # one partial sum per chunk, so that a chunk's scale is read once
        acc = tl.zeros((SLOTS, BLOCK_N // 8, CHUNKS, 8), dtype=tl.float32)
        # a packed row holds 4 bytes per input feature
        for byte in tl.range(0, 4 * last, 4 * BLOCK_K, num_stages=NUM_STAGES):
            k = byte // 4
            x_KA = _load_x_slots(x_ptr_K, k + feature_A, in_features_K)
            x_low, x_high = _split_low_high(x_KA, SLOTS, CHUNKS)
            mask = (byte + byte_A)[None, None, :] < row_bytes_K[:, None, None]
            packed = tl.load(w_ptrs + byte, mask=mask, other=0)
            low, high = unpack_int4(packed, DTYPE, INLINE_PTX)
            low = tl.reshape(low, (SLOTS, BLOCK_N // 8, CHUNKS, 8, 16)).to(tl.float32)
            high = tl.reshape(high, (SLOTS, BLOCK_N // 8, CHUNKS, 8, 16)).to(tl.float32)
            part = tl.sum(low * x_low[:, None, :, None, :] + high * x_high[:, None, :, None, :], axis=4)
            chunk_start_A = k + chunk_A * 32
            mask = chunk_start_A[None, None, :, None] < in_features_K[:, None, None, None]
            offsets = row_offsets
            if GROUP_SIZE > 0:
                offsets += (chunk_start_A // GROUP_SIZE * num_rows)[None, None, :, None]
            if HAS_ZERO_POINT:
                # a chunk has one zero point per row, so it is multiplied by the sum of the chunk's activations
                zero_point = tl.load(zero_point_ptr_K[:, None, None, None] + offsets, mask=mask, other=0.0)
                part -= zero_point.to(tl.float32) * tl.sum(x_low + x_high, axis=2)[:, None, :, None]
            if GROUP_SIZE > 0:
                scale = tl.load(scale_ptr_K[:, None, None, None] + offsets, mask=mask, other=0.0)
                part *= scale.to(tl.float32)
            acc += part
        acc_KO = tl.reshape(tl.sum(acc, axis=2), (SLOTS, BLOCK_N))
        if GROUP_SIZE == 0:
            mask = (row_O * 0)[None, :] < in_features_K[:, None]
            scale_KO = tl.load(scale_ptr_K[:, None] + scale_offset_O[None, :], mask=mask, other=0.0)
            acc_KO *= scale_KO.to(tl.float32)
        return acc_KO


@triton.jit
def _load_x_slots(x_ptr_K, feature_A, in_features_K):
    """Load activations ``[SLOTS, BLOCK_K]`` as float32, zero beyond each slot's input features."""
    mask = feature_A[None, :] < in_features_K[:, None]
    return tl.load(x_ptr_K[:, None] + feature_A[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _split_low_high(x_KA, SLOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Activations that meet low and high nibbles, ``[SLOTS, CHUNKS, 16]`` each, in the order of packed bytes."""
    parts = tl.permute(tl.reshape(x_KA, (SLOTS, CHUNKS, 2, 2, 4, 2)), (0, 1, 4, 3, 5, 2))
    return tl.split(tl.reshape(parts, (SLOTS, CHUNKS, 16, 2)))
