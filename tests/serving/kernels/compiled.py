"""Compiles kernels for cards that are not present.

    python -m tests.serving.kernels.compiled

It is a program because the process of the tests interprets kernels. It prints a JSON object with ``code``, the TTGIR
(Triton's last representation before LLVM) of each kernel by name, and ``shared``, the result of
``shared_memory_on_small_cards``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from moe_coverage_plugin.serving.kernels.down import down_kernel
from moe_coverage_plugin.serving.kernels.gate_up import gate_up_kernel
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED_MEMORY, Tiles, all_plans

HOPPER = GPUTarget("cuda", 90, 32)
SMALL, SMALL_FLOAT8 = GPUTarget("cuda", 86, 32), GPUTarget("cuda", 89, 32)
SMALL_SHARED_MEMORY = 99 * 1024
TOP_K, GROUP_SIZE, UNIT = 4, 128, 32
TYPES = {
    "x_scale_ptr": "*fp32",
    "h_scale_ptr": "*fp32",
    "table_ptr": "*i64",
    "expert_of_tile_ptr": "*i32",
    "sorted_pairs_ptr": "*i32",
    "routing_weight_ptr": "*fp32",
    "bias_ptr": "constexpr",
}


def compiled(
    kernel: Any,
    bits: int,
    block_m: int,
    tiles: Tiles,
    weight_on_input: bool = False,
    has_zero_point: bool = False,
    promote: bool = True,
    target: GPUTarget = HOPPER,
) -> Any:
    """Compile a kernel for bfloat16 hidden states and outputs; with 8 bits, both operands of dots are 8-bit floats."""
    constants = {
        "BITS": bits,
        "GROUP_SIZE": GROUP_SIZE if bits == 4 else 0,
        "UNIT": UNIT,
        "INLINE_PTX": bits == 4,
        "WEIGHT_ON_INPUT": weight_on_input,
        "HAS_BIAS": False,
        "HAS_ZERO_POINT": has_zero_point,
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "SWAP_AB": tiles.swap_ab,
        "PROMOTE": promote,
        "EVEN_K": kernel is gate_up_kernel,
        "PDL": target is HOPPER,
        "bias_ptr": None,
    }
    if not has_zero_point:
        constants["w_zero_point_ptr"] = None
    if bits != 8:
        constants["x_scale_ptr" if kernel is gate_up_kernel else "h_scale_ptr"] = None
    if kernel is gate_up_kernel:
        constants |= {"TOP_K": TOP_K, "ACTIVATION": "silu", "ONE_PAIR_PER_TILE": False, "NUM_EXPERTS": 8}
    names = kernel.arg_names
    factors = {4: {"w_ptr": "*u8"}, 8: dict.fromkeys(("w_ptr", "x_ptr", "h_ptr"), "*fp8e4nv"), 16: {}}[bits]
    if kernel is gate_up_kernel:
        factors.pop("h_ptr", None)
    types = TYPES | factors | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    aligned = [name for name in names if name.endswith("_ptr") and name not in constants] + ["hidden", "h_stride"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": target is HOPPER}
    return compile_kernel(source, target=target, options=options)


def tiled_kernels(bits: int, shared: int = LARGE_SHARED_MEMORY) -> Iterator[tuple[Any, int, Tiles, bool]]:
    """Yield the kernels of all plans that use ``tl.dot``, each once.

    With pairs per tile, tile sizes, and whether 8-bit dot products are promoted.
    """
    found = [
        (kernel, plan.block_m, tiles, plan.promote)
        for plan in all_plans(bits, shared=shared)
        if plan.path == "tiled"
        for kernel, tiles in ((gate_up_kernel, plan.gate_up), (down_kernel, plan.down))
    ]
    yield from dict.fromkeys(found)


def shared_memory_on_small_cards() -> int:
    """Return the largest shared memory in bytes that a kernel needs with the plans for cards with little of it."""
    needed = []
    for bits, target in ((16, SMALL), (4, SMALL), (8, SMALL_FLOAT8)):
        kernels = list(tiled_kernels(bits, SMALL_SHARED_MEMORY))
        # only the kernels with most elements in their pipelines, which need most shared memory
        for kernel, block_m, tiles, promote in sorted(kernels, key=_elements)[-4:]:
            found = compiled(kernel, bits, block_m, tiles, promote=promote, target=target)
            needed.append(found.metadata.shared)
    return max(needed)


def _elements(each: tuple[Any, int, Tiles, bool]) -> int:
    kernel, block_m, tiles, _ = each
    rows = tiles.block_n * (2 if kernel is gate_up_kernel else 1)
    return (block_m + rows) * tiles.block_k * tiles.num_stages


def main() -> None:
    """Compile the kernels of all plans that use ``tl.dot``, and one that applies the routing weight to its input."""
    found = {}
    for bits in (4, 8, 16):
        # the operands of 8-bit dot products are in shared memory with all plans, so two plans are enough
        for kernel, block_m, tiles, promote in list(tiled_kernels(bits))[-4 if bits == 8 else 0 :]:
            sizes = f"{tiles.block_n} by {tiles.block_k} features"
            name = f"{kernel.fn.__name__}, {bits} bits, {block_m} pairs, {sizes}"
            found[name] = compiled(kernel, bits, block_m, tiles, promote=promote)
            if bits == 4:
                found[f"{name}, zero points"] = compiled(kernel, bits, block_m, tiles, has_zero_point=True)
    widest = all_plans(16)[-1]
    found["weight on input"] = compiled(gate_up_kernel, 16, widest.block_m, widest.gate_up, weight_on_input=True)
    code = {name: kernel.asm["ttgir"] for name, kernel in found.items()}
    print(json.dumps({"code": code, "shared": shared_memory_on_small_cards()}))


if __name__ == "__main__":
    main()
