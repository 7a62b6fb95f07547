"""Which kernels run with which tile sizes, decided by shapes alone: a small table, nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

Path = Literal["decode", "tiled"]

DECODE_PAIRS = 64
"""Up to here experts are read straight from the router's choice, without tiles of pairs."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one projection.

    Attributes:
        block_n: output channels per program.
        block_k: input channels per step; with packed weights a multiple of 32.
        warps: per program.
        stages: of the software pipeline.
        group: tiles of pairs that share a block of weights one after the other. Not in ``decode``.
        swap: weights are the left operand. Not in ``decode``.
        dot: ``decode`` alone: multiply on tensor cores.
    """

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    group: int = 1
    swap: bool = True
    dot: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of one forward pass.

    Attributes:
        path: ``decode``, two kernels without tiles of pairs; ``tiled``, routing, two projections and a sum.
        gate_up, down: tile sizes.
        block_m: pairs per tile, 16 or more. Not in ``decode``.
        wide_sum: keep the outputs of pairs in float32 until they are summed. Not in ``decode``, which always does.
    """

    path: Path
    gate_up: Tiles
    down: Tiles
    block_m: int = 16
    wide_sum: bool = False


# Pairs per expert up to which a plan is taken, and the plan.
_Table = tuple[tuple[float, LaunchPlan], ...]

# Measured on an H200 (torch 2.11, Triton 3.6): 128 experts of 640 channels on average, hidden size 2048, 8 per token.
_DECODE_PLAIN = LaunchPlan("decode", Tiles(16, 256, 4, 3), Tiles(8, 128, 4, 3))
_DECODE_PACKED = LaunchPlan("decode", Tiles(16, 512, 4, 2), Tiles(8, 256, 4, 3))
_PLAIN: _Table = (
    (8, LaunchPlan("tiled", Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3), block_m=16)),
    (24, LaunchPlan("tiled", Tiles(64, 128, 8, 3), Tiles(128, 64, 4, 3), block_m=16)),
    (
        48,
        LaunchPlan(
            "tiled",
            Tiles(64, 64, 4, 4, group=4, swap=False),
            Tiles(128, 64, 4, 4, group=4, swap=False),
            block_m=64,
        ),
    ),
    (
        float("inf"),
        LaunchPlan(
            "tiled",
            Tiles(128, 64, 8, 4, group=8, swap=False),
            Tiles(256, 64, 8, 3, group=8, swap=False),
            block_m=128,
        ),
    ),
)
_PACKED: _Table = (
    (32, LaunchPlan("tiled", Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4), block_m=16)),
    (
        float("inf"),
        LaunchPlan(
            "tiled",
            Tiles(128, 64, 8, 3, group=8),
            Tiles(256, 64, 8, 4, group=8),
            block_m=128,
        ),
    ),
)
_FLOAT32 = LaunchPlan("tiled", Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2))


@cache
def choose(pairs: int, experts: int, bits: int, itemsize: int = 2) -> LaunchPlan:
    """The plan for a number of pairs.

    Args:
        pairs: tokens times experts per token.
        experts: number of experts, removed ones included.
        bits: of weights, 16 for plain ones of any dtype.
        itemsize: bytes of a hidden state.
    """
    if itemsize == 4:
        return _FLOAT32
    if pairs <= DECODE_PAIRS:
        plan = _DECODE_PLAIN if bits == 16 else _DECODE_PACKED
    else:
        table = _PLAIN if bits == 16 else _PACKED
        plan = next(plan for limit, plan in table if pairs / experts <= limit)
    return plan
