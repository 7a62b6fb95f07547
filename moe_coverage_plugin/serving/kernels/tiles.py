"""Which kernels run with which tile sizes, decided by shapes alone: a small table, nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Path = Literal["decode", "tiled"]


LARGE_SHARED = 160 * 1024
"""Bytes of shared memory, as cards for servers have from compute capability 8.0 on. Others have 99 KiB."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one projection.

    Attributes:
        block_n: output channels per program.
        block_k: input channels per step; with packed weights a multiple of 32.
        warps: per program.
        stages: of the software pipeline.
        group: tiles of pairs that share a block of weights one after the other.
        swap: weights are the left operand, tokens the short side.
    """

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    group: int = 1
    swap: bool = True


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of one forward pass.

    Attributes:
        path: ``decode``, every pair its own tile, and all of a token's experts in one program of the second
            projection; ``tiled``, routing, two projections and a sum.
        gate_up, down: tile sizes. Of ``down`` in ``decode`` neither ``group`` nor ``swap`` is used.
        block_m: pairs per tile, 16 or more.
        wide_sum: keep the outputs of pairs in float32 until they are summed. Not in ``decode``, which always does.
    """

    path: Path
    gate_up: Tiles
    down: Tiles
    block_m: int = 16
    wide_sum: bool = False


# What follows was measured on an H200 (torch 2.11, Triton 3.6): 128 experts of 640 channels on average in blocks of
# 128, hidden size 2048, 8 experts per token, groups of 128. What is said of large and of few experts: on 8 of 11904
# and of 5888 channels and 128 of 1280, hidden size 4096, and on 256 of 1664, hidden size 7168.

# Pairs up to which a plan is taken, and the plan.
_DECODE_PLAIN = ((32, LaunchPlan("decode", Tiles(32, 64, 4, 6), Tiles(8, 128, 4, 3))),)
_DECODE_FLOAT8 = (
    (8, LaunchPlan("decode", Tiles(32, 128, 4, 6), Tiles(8, 256, 4, 3))),
    (32, LaunchPlan("decode", Tiles(32, 128, 4, 6), Tiles(16, 128, 4, 3))),
)
_DECODE_PACKED = (
    (16, LaunchPlan("decode", Tiles(32, 256, 4, 3), Tiles(8, 256, 4, 3))),
    (32, LaunchPlan("decode", Tiles(64, 128, 4, 4), Tiles(16, 128, 4, 3))),
)
_MOST_DECODED = {16: 110_000_000, 8: 110_000_000, 4: 55_000_000}
"""Weights of ``w2`` that pairs may read where they are not sorted: that saves launches, but reads more slowly."""

# Pairs per expert up to which a plan is taken, and the plan.
_PLAIN = (
    (10, LaunchPlan("tiled", Tiles(64, 128, 8, 3), Tiles(128, 128, 4, 3), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(64, 64, 4, 4), Tiles(256, 64, 4, 3), block_m=32)),
    (
        48,
        LaunchPlan(
            "tiled",
            Tiles(64, 64, 4, 3, group=16, swap=False),
            Tiles(128, 64, 4, 3, group=16, swap=False),
            block_m=64,
        ),
    ),
    (
        inf,
        LaunchPlan(
            "tiled",
            Tiles(128, 64, 8, 4, group=16, swap=False),
            Tiles(256, 64, 8, 4, group=16, swap=False),
            block_m=128,
        ),
    ),
)
_PACKED = (
    (10, LaunchPlan("tiled", Tiles(64, 128, 4, 4), Tiles(128, 64, 4, 5), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(64, 64, 4, 5), Tiles(128, 64, 4, 5), block_m=32)),
    (160, LaunchPlan("tiled", Tiles(64, 64, 4, 4, group=8), Tiles(128, 64, 4, 4, group=8), block_m=64)),
    (inf, LaunchPlan("tiled", Tiles(64, 64, 4, 4, group=8), Tiles(128, 64, 4, 4, group=8), block_m=128)),
)
# sums of 8-bit products are kept twice, see ``arithmetic.dot``: larger tiles do not fit into registers
_FLOAT8 = (
    (10, LaunchPlan("tiled", Tiles(32, 128, 4, 5), Tiles(128, 128, 4, 3), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(32, 256, 4, 3), Tiles(128, 128, 4, 3), block_m=32)),
    (
        inf,
        LaunchPlan("tiled", Tiles(64, 128, 4, 3, group=16, swap=False), Tiles(128, 128, 4, 3, group=16), block_m=64),
    ),
)
_FLOAT32 = LaunchPlan("tiled", Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2))

_FEW_PROGRAMS = 256
"""Programs of a second projection, in blocks of 128 channels, that leave much of a card idle."""

_Table = tuple[tuple[float, LaunchPlan], ...]


def _narrower(table: _Table, down: Tiles) -> _Table:
    """The same plans for few programs: of fewer channels each, which makes more of them, and longer steps."""
    return tuple((limit, replace(plan, down=down)) for limit, plan in table)


# Where the last plan of 16 bits does not fit, the one before takes its pairs.
_PLAIN_OF_SMALL = (*_PLAIN[:-2], (inf, _PLAIN[-2][1]))

# By bits of weights: for pairs that are not sorted, for few programs, and for all others.
_TABLES: dict[int, tuple[_Table, _Table, _Table]] = {
    16: (_DECODE_PLAIN, _narrower(_PLAIN[:2], Tiles(64, 128, 4, 4)), _PLAIN),
    8: (_DECODE_FLOAT8, _narrower(_FLOAT8[:2], Tiles(64, 256, 4, 4)), _FLOAT8),
    4: (_DECODE_PACKED, _narrower(_PACKED[:1], Tiles(64, 256, 4, 3)), _PACKED),
}


def choose(
    pairs: int, experts: int, hidden: int, w2_weights: int, bits: int, itemsize: int = 2, shared: int = LARGE_SHARED
) -> LaunchPlan:
    """The plan for a number of pairs.

    Args:
        pairs: tokens times experts per token.
        experts: number of experts, removed ones included.
        hidden: hidden size.
        w2_weights: weights of all second projections together.
        bits: of weights, see ``KernelWeights``.
        itemsize: bytes of a hidden state.
        shared: bytes of shared memory that a program may have.
    """
    if _has_no_table(bits, itemsize):
        return _FLOAT32
    decode, few_programs, tiled = _tables(bits, shared)
    # pairs of one expert would each read its weights anew: few should meet
    if 3 * pairs <= experts and pairs * w2_weights <= experts * _MOST_DECODED[bits] and pairs <= decode[-1][0]:
        return _first(decode, pairs)
    if min(pairs, experts) * hidden <= 128 * _FEW_PROGRAMS and pairs / experts <= few_programs[-1][0]:
        return _first(few_programs, pairs / experts)
    return _first(tiled, pairs / experts)


def all_plans(bits: int, itemsize: int = 2, shared: int = LARGE_SHARED) -> list[LaunchPlan]:
    """Every plan that ``choose`` may give, the smallest first."""
    if _has_no_table(bits, itemsize):
        return [_FLOAT32]
    return [plan for table in _tables(bits, shared) for _, plan in table]


def _tables(bits: int, shared: int) -> tuple[_Table, _Table, _Table]:
    decode, few_programs, tiled = _TABLES[bits]
    return decode, few_programs, _PLAIN_OF_SMALL if bits == 16 and shared < LARGE_SHARED else tiled


def _first(table: _Table, count: float) -> LaunchPlan:
    return next(plan for limit, plan in table if count <= limit)


def _has_no_table(bits: int, itemsize: int) -> bool:
    # activations of 8 bits are those that products are made of, whatever hidden states are
    return itemsize == 4 and bits != 8
