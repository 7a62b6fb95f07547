"""Which kernels run with which tile sizes: a table by shapes, measured once; nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Path = Literal["decode", "tiled"]

LARGE_SHARED_MEMORY = 160 * 1024
"""Bytes of shared memory per program that cards for servers have at least from compute capability 8.0 on.

Other cards have 99 KiB.
"""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one projection.

    Attributes:
        block_n: output features per program; in ``gate_up``, channels, which are two rows of weights each.
        block_k: input features per step; with packed weights a multiple of 32.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        group_m: tiles of pairs that use the same weights one after the other, see ``tile_of_program``.
        swap_ab: make weights the left operand of dot products, see ``mma``.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 1
    swap_ab: bool = True


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of one forward pass.

    Attributes:
        path: ``decode``: each pair is its own tile, and one program computes ``down`` for all slots of a token.
            ``tiled``: routing, both projections by tiles of pairs, and a sum.
        gate_up: tile sizes of the gate and up projection.
        down: tile sizes of the down projection; ``decode`` uses neither its ``group_m`` nor its ``swap_ab``.
        block_m: pairs per tile, 8 or more; with 8, Triton uses ``mma.sync``, which is faster for packed weights.
        float32_z: keep the outputs of pairs in float32 until they are summed. ``decode`` always does.
        early: programs of both projections may start while the kernel before ends, see ``dependent_launch``. Too few
            programs to fill a card are spread over it evenly only if it is idle.
        promote: add the sum of each step of 8-bit dot products to a float32 accumulator, see ``dot``.
    """

    path: Path
    gate_up: Tiles
    down: Tiles
    block_m: int = 16
    float32_z: bool = False
    early: bool = True
    promote: bool = True


# All numbers below were measured on an H200 (torch 2.11, Triton 3.6; the first plans of 16 and of 4 bits: torch 2.13,
# Triton 3.7): the plans with 128 experts of 640 channels on average in multiples of 128, hidden size 2048, 8 experts
# per token and quantization groups of 128; the limits for large and for few experts also with 8 experts of 11904 and
# of 5888 channels and 128 of 1280 at hidden size 4096, and with 256 experts of 1664 channels at hidden size 7168.

# Plans by the number of pairs up to which they are chosen.
_DECODE_PLAIN = ((32, LaunchPlan("decode", Tiles(32, 64, 4, 6), Tiles(8, 128, 4, 3))),)
_DECODE_FLOAT8 = (
    (8, LaunchPlan("decode", Tiles(32, 128, 4, 6), Tiles(8, 256, 4, 3))),
    (32, LaunchPlan("decode", Tiles(32, 128, 4, 6), Tiles(16, 128, 4, 3))),
)
_DECODE_PACKED = ((16, LaunchPlan("decode", Tiles(32, 256, 4, 3), Tiles(8, 256, 4, 3), early=False)),)
_MAX_DECODED_WEIGHTS = {16: 110_000_000, 8: 110_000_000, 4: 55_000_000}
"""Weights of ``w2`` up to which pairs are decoded, by bits: fewer launches, but weights are read more slowly."""

# Plans by the number of pairs per expert up to which they are chosen.
_PLAIN = (
    (5, LaunchPlan("tiled", Tiles(32, 128, 4, 4), Tiles(128, 128, 4, 3), block_m=16)),
    (10, LaunchPlan("tiled", Tiles(64, 128, 8, 3), Tiles(128, 128, 4, 3), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(64, 64, 4, 4), Tiles(256, 64, 4, 3), block_m=32)),
    (
        48,
        LaunchPlan(
            "tiled",
            Tiles(64, 64, 4, 3, group_m=16, swap_ab=False),
            Tiles(128, 64, 4, 3, group_m=16, swap_ab=False),
            block_m=64,
        ),
    ),
    (
        inf,
        LaunchPlan(
            "tiled",
            Tiles(128, 64, 8, 4, group_m=16, swap_ab=False),
            Tiles(256, 64, 8, 4, group_m=16, swap_ab=False),
            block_m=128,
        ),
    ),
)
_PACKED = (
    # a few tokens of experts too large to be decoded
    (0.05, LaunchPlan("tiled", Tiles(32, 128, 4, 4), Tiles(128, 128, 4, 3), block_m=8, early=False)),
    (0.15, LaunchPlan("tiled", Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3), block_m=8, early=False)),
    (1.5, LaunchPlan("tiled", Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3), block_m=8)),
    (6, LaunchPlan("tiled", Tiles(128, 64, 4, 3), Tiles(128, 128, 4, 3), block_m=8)),
    (10, LaunchPlan("tiled", Tiles(64, 128, 4, 4), Tiles(128, 64, 4, 5), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(64, 64, 4, 5), Tiles(128, 64, 4, 5), block_m=32)),
    (160, LaunchPlan("tiled", Tiles(64, 64, 4, 4, group_m=8), Tiles(128, 64, 4, 4, group_m=8), block_m=64)),
    (inf, LaunchPlan("tiled", Tiles(64, 64, 4, 4, group_m=8), Tiles(128, 64, 4, 4, group_m=8), block_m=128)),
)
# Promoted 8-bit dot products need two accumulators, so larger tiles do not fit into registers. With enough pairs to be
# limited by arithmetic, larger tiles are worth more than exact sums.
_FLOAT8 = (
    (10, LaunchPlan("tiled", Tiles(32, 128, 4, 5), Tiles(128, 128, 4, 3), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(32, 256, 4, 3), Tiles(128, 128, 4, 3), block_m=32)),
    (
        160,
        LaunchPlan(
            "tiled", Tiles(64, 128, 4, 3, group_m=16, swap_ab=False), Tiles(128, 128, 4, 3, group_m=16), block_m=64
        ),
    ),
    (
        inf,
        LaunchPlan(
            "tiled",
            Tiles(128, 128, 8, 4, group_m=16, swap_ab=False),
            Tiles(256, 128, 8, 4, group_m=16, swap_ab=False),
            block_m=128,
            promote=False,
        ),
    ),
)
_FLOAT32 = LaunchPlan("tiled", Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2))

_FEW_PROGRAMS = 256
"""Programs of the down projection, in tiles of 128 output features, up to which much of a card is idle."""

_Table = tuple[tuple[float, LaunchPlan], ...]


def _with_down(table: _Table, down: Tiles) -> _Table:
    """The same plans with other tiles of ``down``, for few programs."""
    return tuple((limit, replace(plan, down=down, early=False)) for limit, plan in table)


# By bits of weights: tables for decoding, for few programs (narrower tiles make more of them, with longer steps), and
# for all other cases.
_TABLES: dict[int, tuple[_Table, _Table, _Table]] = {
    16: (_DECODE_PLAIN, _with_down(_PLAIN[1:3], Tiles(64, 128, 4, 4)), _PLAIN),
    8: (_DECODE_FLOAT8, _with_down(_FLOAT8[:2], Tiles(64, 256, 4, 4)), _FLOAT8),
    4: (_DECODE_PACKED, _with_down(_PACKED[4:5], Tiles(64, 256, 4, 3)), _PACKED),
}


def choose_plan(
    num_pairs: int,
    experts: int,
    hidden: int,
    w2_numel: int,
    bits: int,
    itemsize: int = 2,
    shared: int = LARGE_SHARED_MEMORY,
) -> LaunchPlan:
    """The plan for a number of pairs.

    Args:
        num_pairs: tokens times experts per token.
        experts: number of experts, removed ones included.
        hidden: hidden size.
        w2_numel: weights of all experts' ``w2``.
        bits: of weights, see ``KernelWeights``.
        itemsize: bytes of an element of the hidden states.
        shared: bytes of shared memory that one program may have.
    """
    if _is_float32(bits, itemsize):
        return _FLOAT32
    decode, few_programs, tiled = _tables(bits, shared)
    pairs_per_expert = num_pairs / experts
    # decoding reads an expert's weights once for each of its pairs, so it pays only if experts rarely get several
    is_sparse = 3 * num_pairs <= experts and num_pairs <= decode[-1][0]
    if is_sparse and num_pairs * w2_numel <= experts * _MAX_DECODED_WEIGHTS[bits]:
        return _first(decode, num_pairs)
    if min(num_pairs, experts) * hidden <= 128 * _FEW_PROGRAMS and pairs_per_expert <= few_programs[-1][0]:
        return _first(few_programs, pairs_per_expert)
    return _first(tiled, pairs_per_expert)


def all_plans(bits: int, itemsize: int = 2, shared: int = LARGE_SHARED_MEMORY) -> list[LaunchPlan]:
    """Every plan that ``choose_plan`` may return, the smallest first; arguments are the same."""
    if _is_float32(bits, itemsize):
        return [_FLOAT32]
    return [plan for table in _tables(bits, shared) for _, plan in table]


def _tables(bits: int, shared: int) -> tuple[_Table, _Table, _Table]:
    decode, few_programs, tiled = _TABLES[bits]
    if bits != 4 and shared < LARGE_SHARED_MEMORY:
        # the last plan needs large shared memory; without it, the plan before is used for its pairs, too
        tiled = (*tiled[:-2], (inf, tiled[-2][1]))
    return decode, few_programs, tiled


def _first(table: _Table, count: float) -> LaunchPlan:
    return next(plan for limit, plan in table if count <= limit)


def _is_float32(bits: int, itemsize: int) -> bool:
    # with 8-bit weights, dot products are of 8-bit floats whatever the dtype of the hidden states
    return itemsize == 4 and bits != 8
