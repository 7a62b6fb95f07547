"""One tile of ``x @ w.T`` for the rows that are routed to one expert: the inner loop of both projections."""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import expand_o, init_accumulator, mma, round_to, wait_for_dot
from moe_coverage_plugin.serving.kernels.int4 import apply_scale, subtract_zero_point
from moe_coverage_plugin.serving.kernels.packed_weights import (
    feature_order,
    load_group_scales,
    load_packed,
    load_row_scales,
    load_scales,
    packed_ptrs,
    unpack_step,
)


@triton.jit
def matmul_tile(
    x_ptr_M1, mask_M, routing_weight_M, w_ptr, scale_ptr, zero_point_ptr, row_O, first_row, num_rows, in_features,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, MUL_ROUTING_WEIGHT: tl.constexpr, SWAP_AB: tl.constexpr, PROMOTE: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """``BLOCK_M`` routed rows of activations times ``BLOCK_N`` rows of one expert's weights.

    ``acc[m, o] = sum over a of x[m, a] * w[o, a]``, accumulated in float32 over steps of ``BLOCK_K`` input features in
    ascending order (of 8-bit floats: see ``dot``). With ``BITS`` 8, neither activations nor weights are scaled: the
    caller multiplies ``acc``. With ``BITS`` 4 and quantization groups, weights are dequantized and rounded to the
    dtype of ``x`` before each dot product, or, with fewer than 16 rows, the sum of each step is scaled in float32;
    with one scale per row, ``acc`` is scaled at the end.

    Operands:
        x_ptr_M1: pointers to the activations of each routed row.
        mask_M: whether a row exists; others are not read, and their results are zero.
        routing_weight_M: float32 factor of each row's activations if ``MUL_ROUTING_WEIGHT``; the product is rounded to
            their dtype.
        w_ptr: the expert's matrix ``[num_rows, in_features]``, plain or packed.
        scale_ptr: its scales if it is packed.
        zero_point_ptr: its zero points if ``HAS_ZERO_POINT``, in the dtype of the scales.
        row_O: rows of a plain matrix; they must exist.
        first_row: first row of a packed matrix, whose rows are consecutive; a multiple of 16.
        num_rows: rows of a packed matrix.
        in_features: input features, which is the row stride of a plain matrix.

    Constants (others: see the package):
        EVEN_K: whether ``in_features`` is a multiple of ``BLOCK_K``.
        MUL_ROUTING_WEIGHT: multiply ``x`` by ``routing_weight_M``.

    Returns:
        An accumulator of ``mma``.
    """
    acc = init_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    if BITS != 4:
        feature_A = tl.arange(0, BLOCK_K)
        w_ptr_O1 = (w_ptr + row_O * in_features)[:, None]
        for k in range(0, in_features, BLOCK_K):
            x = _load_x(x_ptr_M1, mask_M, k + feature_A, in_features, routing_weight_M, EVEN_K, MUL_ROUTING_WEIGHT)
            acc = mma(x, _load_w(w_ptr_O1, k + feature_A, in_features, EVEN_K), acc, SWAP_AB, PROMOTE)
            if MUL_ROUTING_WEIGHT and not SWAP_AB:
                acc = wait_for_dot(acc)
    else:
        DTYPE: tl.constexpr = x_ptr_M1.dtype.element_ty
        # Triton then uses mma.sync, which has few results per thread: scaling these takes fewer instructions
        NARROW: tl.constexpr = BLOCK_M < 16
        SCALE_SUMS: tl.constexpr = NARROW and GROUP_SIZE > 0 and GROUP_SIZE % BLOCK_K == 0
        feature_A = feature_order(BLOCK_K, NARROW)
        w_ptrs = packed_ptrs(w_ptr, first_row, num_rows, in_features, BLOCK_N, BLOCK_K)
        if SCALE_SUMS:
            next_scale_O = load_group_scales(scale_ptr, first_row, num_rows, 0, in_features > 0, GROUP_SIZE, BLOCK_N)
        # a packed row holds 4 bytes per input feature
        for byte in range(0, 4 * in_features, 4 * BLOCK_K):
            k = byte // 4
            x = _load_x(x_ptr_M1, mask_M, k + feature_A, in_features, routing_weight_M, EVEN_K, MUL_ROUTING_WEIGHT)
            packed = load_packed(w_ptrs, byte, in_features, EVEN_K, BLOCK_K)
            w = unpack_step(packed, DTYPE, INLINE_PTX, BLOCK_N, BLOCK_K, NARROW)
            if HAS_ZERO_POINT:
                zero_point = load_scales(
                    zero_point_ptr, first_row, num_rows, k, in_features, GROUP_SIZE, BLOCK_N, BLOCK_K, NARROW
                )
                w = subtract_zero_point(w, zero_point, INLINE_PTX)
            if SCALE_SUMS:
                # loaded one step ahead, because Triton pipelines only loads that feed a dot product
                scale_O = next_scale_O
                next_k = k + BLOCK_K
                next_scale_O = load_group_scales(
                    scale_ptr, first_row, num_rows, next_k, next_k < in_features, GROUP_SIZE, BLOCK_N
                )
                part = mma(x, w, init_accumulator(BLOCK_M, BLOCK_N, SWAP_AB), SWAP_AB)
                acc += part * expand_o(scale_O.to(tl.float32), SWAP_AB)
            else:
                if GROUP_SIZE > 0:
                    # weights and not results, for the same reason
                    scale = load_scales(
                        scale_ptr, first_row, num_rows, k, in_features, GROUP_SIZE, BLOCK_N, BLOCK_K, NARROW
                    )
                    w = apply_scale(w, scale, INLINE_PTX)
                acc = mma(x, w, acc, SWAP_AB)
                if (SWAP_AB or MUL_ROUTING_WEIGHT) and not NARROW:
                    acc = wait_for_dot(acc)
        if GROUP_SIZE == 0:
            scale_O = load_row_scales(scale_ptr, first_row, num_rows, in_features > 0, BLOCK_N)
            acc *= expand_o(scale_O.to(tl.float32), SWAP_AB)
    return acc


@triton.jit
def tile_of_program(program, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """A program's tile of routed rows and tile of output features.

    Groups of ``GROUP_M`` row tiles visit each tile of output features together, so that its weights are read from the
    L2 cache (the grouped order of Triton's matrix multiplication tutorial).

    Returns:
        ``tile_m, tile_n``.
    """
    group = program // (GROUP_M * num_tiles_n)
    first = group * GROUP_M
    size = tl.minimum(num_tiles_m - first, GROUP_M)
    within = program % (GROUP_M * num_tiles_n)
    return first + within % size, within // size


@triton.jit
def _load_x(
    x_ptr_M1, mask_M, feature_A, in_features, routing_weight_M, EVEN_K: tl.constexpr, MUL_ROUTING_WEIGHT: tl.constexpr
):
    """Load activations ``[BLOCK_M, BLOCK_K]``, zero in rows outside of ``mask_M`` and beyond ``in_features``."""
    # masked, not read from another row: all programs would read the same few cache lines at once
    mask = mask_M[:, None]
    if not EVEN_K:
        mask &= (feature_A < in_features)[None, :]
    x = tl.load(x_ptr_M1 + feature_A[None, :], mask=mask, other=0.0)
    if MUL_ROUTING_WEIGHT:
        x = round_to(x.to(tl.float32) * routing_weight_M[:, None], x.dtype)
    return x


@triton.jit
def _load_w(w_ptr_O1, feature_A, in_features, EVEN_K: tl.constexpr):
    """Load plain weights ``[BLOCK_N, BLOCK_K]``, zero beyond ``in_features``."""
    if EVEN_K:
        return tl.load(w_ptr_O1 + feature_A[None, :])
    else:
        return tl.load(w_ptr_O1 + feature_A[None, :], mask=(feature_A < in_features)[None, :], other=0.0)
