"""Arithmetic that the kernels share: rounding, dot products, activations, and 4-bit values to floating point.

Triton's interpreter holds bfloat16 as bare bits: it multiplies those bits in ``tl.dot`` and truncates where hardware
rounds to nearest, and truncates to 8-bit floats, too. Everything that touches such values therefore passes through
here.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, where inline assembly is not to be had."""

# Nibbles become floats without a conversion: below the exponent byte of 128 (bfloat16) or 1024 (float16) a nibble is
# the lowest bits of the mantissa. The subtraction of 136 or 1032 is exact.
_NIBBLES_TO_HALVES = """
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
NIBBLES_BF16 = tl.constexpr(
    _NIBBLES_TO_HALVES.format(exponent="0x43434343", one="0x3f803f80", offset="0xc308c308", type="bf16")
)
NIBBLES_FP16 = tl.constexpr(
    _NIBBLES_TO_HALVES.format(exponent="0x64646464", one="0x3c003c00", offset="0xe408e408", type="f16")
)
# A product as a fused multiply-add of -0: the packed multiplication of bfloat16 needs a newer card than this does.
PRODUCT_BF16 = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
# A difference in the same way: what is taken off, times -1, plus the other.
DIFFERENCE_BF16 = tl.constexpr("{ .reg .b32 minus; mov.b32 minus, 0xbf80bf80; fma.rn.bf16x2 $0, $2, minus, $1; }")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 to ``DTYPE``, to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED and DTYPE == tl.float8e4nv:  # noqa: SIM300
        # the last of three bits of the mantissa, below the least normal number that of the least
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
        last = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        # adding so much leaves no bits for fractions
        bits = ((x / last + 12582912.0 - 12582912.0) * last).to(DTYPE).to(tl.uint8, bitcast=True)
        return tl.where(x == x, bits, 0x7F).to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc`` in float32; float32 operands are not rounded."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float8e4nv:
        # Hopper keeps 14 bits while it sums products of 8-bit floats: for no longer than one call
        return tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_tokens(w, x, acc, SWAP: tl.constexpr):
    """Add the products of weight rows and tokens.

    Args:
        w: ``[BLOCK_N, K]``.
        x: ``[BLOCK_M, K]``, in the type of ``w``.
        acc: float32 ``[BLOCK_N, BLOCK_M]`` if ``SWAP``, else ``[BLOCK_M, BLOCK_N]``.
        SWAP: weights are the left operand, which may stay in registers, and tokens the short side.
    """
    if SWAP:
        return dot(w, tl.trans(x), acc)
    else:
        return dot(x, tl.trans(w), acc)


@triton.jit
def settled(acc):
    """``acc``, once its dot product has finished; for products whose left operand is computed in registers.

    Hopper's tensor cores read such operands while the program goes on, and compilers (Triton up to 3.6, ptxas before
    13.3: triton-lang/triton#9433) let the next step write them too early. What reads the sum has to wait for it.
    """
    if INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def along_rows(row_N, SWAP: tl.constexpr):
    """One value per weight row, to be broadcast over an accumulator of ``dot_tokens``."""
    if SWAP:
        return row_N[:, None]
    else:
        return row_N[None, :]


@triton.jit
def along_tokens(token_M, SWAP: tl.constexpr):
    """One value per token, to be broadcast over an accumulator of ``dot_tokens``."""
    if SWAP:
        return token_M[None, :]
    else:
        return token_M[:, None]


@triton.jit
def accumulator(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Zeros to begin ``dot_tokens`` with."""
    if SWAP:
        return tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def nibbles(packed, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Signed values -8..7 of the low and of the high nibbles.

    Args:
        packed: uint8, values plus 8. If ``FAST``, at least 4 adjacent elements per thread.
        DTYPE: floating type of the result.
        FAST: in 11 instructions for 8 values by inline assembly; needs a 16-bit ``DTYPE`` and compute capability 8.
    """
    if FAST and not INTERPRETED:
        # the types are written out: names of types inside a tuple are not resolved
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            return tl.inline_asm_elementwise(
                NIBBLES_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                NIBBLES_FP16, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        low = (packed & 0xF).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def shifted(value, zero_point, FAST: tl.constexpr):
    """``value - zero_point`` in their common type, of small integers, so not rounded; broadcast before."""
    if FAST and not INTERPRETED and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            DIFFERENCE_BF16, "=r,r,r", [value, zero_point], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return rounded(value.to(tl.float32) - zero_point.to(tl.float32), value.dtype)


@triton.jit
def scaled(value, scale, FAST: tl.constexpr):
    """``value * scale`` in their common type, rounded once; broadcast before."""
    if FAST and not INTERPRETED and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            PRODUCT_BF16, "=r,r,r", [value, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return rounded(value.to(tl.float32) * scale.to(tl.float32), value.dtype)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of a gate in float32: ``silu``, ``gelu`` or ``gelu_tanh``."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 is sigmoid(2 u)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
