"""Dequantization of 4-bit weights in registers: ``(unpack_int4(packed) - zero point) * scale``.

Each step has two implementations: inline PTX for 16-bit dtypes on a card, and plain Triton for float32 and for the
interpreter. Both give the same bits.
"""

import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import INTERPRETED, round_to

# A nibble becomes a float without a conversion: placed below the exponent byte of 128 (bfloat16) or 1024 (float16), it
# is the lowest bits of the mantissa. Subtracting 136 or 1032 is exact and removes the stored offset of 8, too.
_UNPACK_INT4 = """
{{
.reg .b32 low, high, one, offset;
and.b32 low, $4, 0x0f0f0f0f;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
mov.b32 one, {one};
mov.b32 offset, {offset};
prmt.b32 $0, low, {exponent}, 0x4140;
prmt.b32 $1, low, {exponent}, 0x4342;
prmt.b32 $2, high, {exponent}, 0x4140;
prmt.b32 $3, high, {exponent}, 0x4342;
fma.rn.{type}x2 $0, $0, one, offset;
fma.rn.{type}x2 $1, $1, one, offset;
fma.rn.{type}x2 $2, $2, one, offset;
fma.rn.{type}x2 $3, $3, one, offset;
}}
"""
UNPACK_INT4_BF16 = tl.constexpr(
    _UNPACK_INT4.format(exponent="0x43434343", one="0x3f803f80", offset="0xc308c308", type="bf16")
)
UNPACK_INT4_FP16 = tl.constexpr(
    _UNPACK_INT4.format(exponent="0x64646464", one="0x3c003c00", offset="0xe408e408", type="f16")
)
# a * b as fma(a, b, -0): mul.bf16x2 needs compute capability 9.0, fma.rn.bf16x2 needs 8.0
MUL_BF16X2 = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
# a - b as fma(b, -1, a), for the same reason
SUB_BF16X2 = tl.constexpr("{ .reg .b32 minus; mov.b32 minus, 0xbf80bf80; fma.rn.bf16x2 $0, $2, minus, $1; }")


@triton.jit
def unpack_int4(packed, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Signed values -8..7 of the low and of the high nibbles.

    Args:
        packed: uint8, two values plus 8 each. With ``INLINE_PTX``, a thread must hold 4 adjacent elements or more.
        DTYPE: floating dtype of the result.
        INLINE_PTX: unpack 8 values in 11 instructions; needs a 16-bit ``DTYPE`` and compute capability 8.0.

    Returns:
        Two tensors in the shape of ``packed``.
    """
    if INLINE_PTX and not INTERPRETED:
        # the dtypes are written out because Triton does not resolve DTYPE inside a tuple
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            return tl.inline_asm_elementwise(
                UNPACK_INT4_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                UNPACK_INT4_FP16, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        low = (packed & 0xF).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def subtract_zero_point(value, zero_point, INLINE_PTX: tl.constexpr):
    """``value - zero_point``: small integers in one floating dtype, so exact. Both have the same shape."""
    if INLINE_PTX and not INTERPRETED and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            SUB_BF16X2, "=r,r,r", [value, zero_point], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return round_to(value.to(tl.float32) - zero_point.to(tl.float32), value.dtype)


@triton.jit
def apply_scale(value, scale, INLINE_PTX: tl.constexpr):
    """``value * scale`` in their common dtype, rounded once. Both have the same shape."""
    if INLINE_PTX and not INTERPRETED and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(MUL_BF16X2, "=r,r,r", [value, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return round_to(value.to(tl.float32) * scale.to(tl.float32), value.dtype)
