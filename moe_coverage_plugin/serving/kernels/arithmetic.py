"""Arithmetic that all kernels share: rounding, dot products and activations.

Triton's interpreter stores bfloat16 as raw bits: its ``tl.dot`` multiplies these bits, and its casts to bfloat16 and
to 8-bit floats truncate. All casts and dot products of such values therefore go through this module, which gives the
interpreter the results of the hardware.
"""

import triton
import triton.language as tl

# patch: triton-interpreter
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which has no inline assembly."""


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Cast float32 to ``DTYPE``, to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED and DTYPE == tl.float8e4nv:  # noqa: SIM300
        # the unit in the last place: 3 bits of mantissa, and subnormals share the exponent of the least normal number
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
        ulp = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        # 1.5 * 2**23 leaves no mantissa bits for a fraction, so adding it rounds to an integer
        bits = ((x / ulp + 12582912.0 - 12582912.0) * ulp).to(DTYPE).to(tl.uint8, bitcast=True)
        return tl.where(x == x, bits, 0x7F).to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, PROMOTE: tl.constexpr):
    """``a @ b + acc``, accumulated in float32; float32 operands are not rounded to TF32.

    Hopper adds products of 8-bit floats in 14 bits. With ``PROMOTE``, the sum of each call is added to a second
    accumulator in float32; without it, an emulation gives sums of 12,000 random products a relative error of 0.003,
    where the rounding of the operands to 8 bits makes one of 0.04.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float8e4nv and PROMOTE:
        return tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    elif a.dtype == tl.float8e4nv:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def mma(x, w, acc, SWAP_AB: tl.constexpr, PROMOTE: tl.constexpr = True):
    """``x @ w.T + acc``, or its transpose if ``SWAP_AB``.

    Args:
        x: activations ``[BLOCK_M, BLOCK_K]``.
        w: weights ``[BLOCK_N, BLOCK_K]`` in the dtype of ``x``.
        acc: float32 ``[BLOCK_M, BLOCK_N]``, or ``[BLOCK_N, BLOCK_M]`` if ``SWAP_AB``.
        SWAP_AB: make weights the left operand, which may stay in registers, and tokens the right one, which may be
            narrow.
        PROMOTE: see ``dot``.
    """
    if SWAP_AB:
        return dot(w, tl.trans(x), acc, PROMOTE)
    else:
        return dot(x, tl.trans(w), acc, PROMOTE)


# patch: triton-wait-for-dot
@triton.jit
def wait_for_dot(acc):
    """``acc`` after the dot product that computes it has finished; needed if its left operand is in registers.

    Workaround for triton-lang/triton#9433. On Hopper, ``wgmma`` reads a left operand in registers while the program
    continues, and ptxas before 13.3 lets the next iteration of a pipelined loop overwrite these registers too early.
    The empty assembly reads ``acc``, which makes Triton wait for all pending dot products in every iteration.

    Remove it when the oldest supported vLLM comes with Triton 3.9 or newer. Triton 3.9 is the first release that
    assembles sm_90 with ptxas 13.3 or newer; earlier ones use ptxas 12.9 or older.
    ``tests/serving/kernels/test_machine_code.py`` fails as soon as the oldest supported vLLM changes.
    """
    if INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def expand_o(value_O, SWAP_AB: tl.constexpr):
    """One value per output feature (row of weights), to be broadcast over an accumulator of ``mma``."""
    if SWAP_AB:
        return value_O[:, None]
    else:
        return value_O[None, :]


@triton.jit
def expand_m(value_M, SWAP_AB: tl.constexpr):
    """One value per routed row, to be broadcast over an accumulator of ``mma``."""
    if SWAP_AB:
        return value_M[None, :]
    else:
        return value_M[:, None]


@triton.jit
def init_accumulator(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr):
    """Zeros in the shape of an accumulator of ``mma``."""
    if SWAP_AB:
        return tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def apply_activation(gate, ACTIVATION: tl.constexpr):
    """The activation of ``gate_proj``'s output in float32: ``silu``, ``gelu`` or ``gelu_tanh``."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 is sigmoid(2 u)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
