"""Tiles of (token, expert) pairs: pairs sorted by expert, so that a tile needs one expert's weights.

A pair is ``token * K + slot``. Every expert's pairs come in order, padded to whole tiles of ``block_m``. Nothing is
counted on the host: all sizes are bounds that follow from shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ONE_KERNEL = ((64, 64), (1024, 1024))
"""Up to so many pairs one kernel does it all, every program counting all pairs anew, by blocks of so many: that costs
less than more launches."""

PAIR_BLOCK, LARGE_PAIR_BLOCK = 64, 128
# comparisons of pairs and others that a program holds at once: more than 32 for each thread would leave the registers
RANK_BLOCK, LARGE_RANK_BLOCK = 64, 32
TILE_BLOCK, EXPERT_BLOCK = 64, 16


class Routing(NamedTuple):
    """Pairs in tiles.

    Attributes:
        sorted_pairs: int32, ``block_m`` pairs of every tile; the number of pairs marks a place that is empty. Unset
            beyond the last used tile.
        expert_of_tile: int32, -1 where a tile is not used; used ones come first.
    """

    sorted_pairs: Tensor
    expert_of_tile: Tensor


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """The most tiles that ``pairs`` pairs can need: one begun per expert that gets any, and the full ones."""
    begun = min(pairs, experts)
    return begun + (pairs - begun) // block_m


def count_block(pairs: int) -> int | None:
    """Pairs that one kernel counts at once, ``None`` where three kernels sort them."""
    return next((block for limit, block in ONE_KERNEL if pairs <= limit), None)


def route_reference(topk_ids_TK: Tensor, widths_E: Tensor, block_m: int, min_width: int = 1) -> Routing:
    """What ``route`` computes, in plain torch; only the used part of ``sorted_pairs``."""
    ids_P = topk_ids_TK.flatten().long()
    pairs, tiles = len(ids_P), []
    for expert, width in enumerate(widths_E.tolist()):
        pair_N = (ids_P == expert).nonzero().flatten()
        if width >= min_width:
            tiles += [(expert, part.tolist()) for part in pair_N.split(block_m) if len(part)]
    places = [pair for _, part in tiles for pair in part + [pairs] * (block_m - len(part))]
    unused = max_tiles(pairs, len(widths_E), block_m) - len(tiles)
    experts = [expert for expert, _ in tiles] + [-1] * unused
    return Routing(
        torch.tensor(places, dtype=torch.int32),
        torch.tensor(experts, dtype=torch.int32),
    )


def route(topk_ids_TK: Tensor, table_E4: Tensor, block_m: int, min_width: int = 1) -> Routing:
    """Sort pairs into tiles; stable, so equal inputs give equal tiles.

    Args:
        topk_ids_TK: integer expert numbers, contiguous; negative ones and experts below ``min_width`` get no place.
        table_E4: the experts' table of ``KernelWeights``.
        block_m: pairs per tile, a power of two.
        min_width: 1, or 0 if experts of width 0 have something to add.
    """
    pairs, experts, device = topk_ids_TK.numel(), len(table_E4), topk_ids_TK.device
    tiles = max_tiles(pairs, experts, block_m)
    routing = Routing(
        torch.empty(tiles * block_m, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    counted = count_block(pairs)
    one_kernel = counted is not None
    pair_block = PAIR_BLOCK if one_kernel else LARGE_PAIR_BLOCK
    blocks, bins = triton.cdiv(pairs, pair_block), triton.next_power_of_2(experts)
    totals_E = earlier_BE = topk_ids_TK  # not read where one kernel does it all
    if not one_kernel:
        earlier_BE = torch.empty(blocks, bins, dtype=torch.int32, device=device)
        totals_E = torch.empty(bins, dtype=torch.int32, device=device)
        _count_kernel[(blocks,)](
            *(topk_ids_TK, table_E4, earlier_BE, pairs),
            MIN_WIDTH=min_width,
            BLOCK=pair_block,
            BINS=bins,
        )
        _earlier_kernel[(triton.cdiv(bins, EXPERT_BLOCK),)](
            *(earlier_BE, totals_E, blocks),
            BLOCK=128,
            EXPERT_BLOCK=EXPERT_BLOCK,
            BINS=bins,
        )
    _place_kernel[(blocks,)](
        *(topk_ids_TK, table_E4, earlier_BE, totals_E, *routing, pairs, tiles),
        ONE_KERNEL=one_kernel,
        MIN_WIDTH=min_width,
        BLOCK_M=block_m,
        BLOCK=pair_block,
        COUNT_BLOCK=counted or 0,
        RANK_BLOCK=RANK_BLOCK if one_kernel else LARGE_RANK_BLOCK,
        TILE_BLOCK=TILE_BLOCK,
        BINS=bins,
    )
    return routing


@triton.jit
def _experts_of(ids_ptr, table_ptr, pair, pairs, MIN_WIDTH: tl.constexpr):
    """Experts of pairs, -1 for those without a place."""
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    width = tl.load(table_ptr + expert * 4, mask=expert >= 0, other=-1)
    return tl.where(width >= MIN_WIDTH, expert, -1)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids_ptr, table_ptr, counts_ptr, pairs, MIN_WIDTH: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """Pairs of every expert in every block of pairs."""
    block = tl.program_id(0)
    expert = _experts_of(ids_ptr, table_ptr, block * BLOCK + tl.arange(0, BLOCK), pairs, MIN_WIDTH)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=expert >= 0))


@triton.jit(do_not_specialize=["blocks"])
def _earlier_kernel(
    counts_ptr, totals_ptr, blocks, BLOCK: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """Counts of blocks, in place, to counts of all earlier blocks; and the totals."""
    expert = tl.program_id(0) * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)
    total = tl.zeros((EXPERT_BLOCK,), dtype=tl.int32)
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        places = counts_ptr + block[:, None] * BINS + expert[None, :]
        mask = (block < blocks)[:, None] & (expert < BINS)[None, :]
        counts = tl.load(places, mask=mask, other=0)
        tl.store(places, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total, mask=expert < BINS)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_kernel(
    ids_ptr, table_ptr, earlier_ptr, totals_ptr, sorted_ptr, expert_of_tile_ptr, pairs, tiles,
    ONE_KERNEL: tl.constexpr, MIN_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    COUNT_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Every program places its block of pairs and its share of tiles; none waits for another."""
    block = tl.program_id(0)
    first = block * BLOCK
    pair = first + tl.arange(0, BLOCK)
    expert = _experts_of(ids_ptr, table_ptr, pair, pairs, MIN_WIDTH)

    earlier = tl.zeros((BINS,), dtype=tl.int32)
    if ONE_KERNEL:
        total = tl.zeros((BINS,), dtype=tl.int32)
        for start in range(0, pairs, COUNT_BLOCK):
            counted = _experts_of(ids_ptr, table_ptr, start + tl.arange(0, COUNT_BLOCK), pairs, MIN_WIDTH)
            total += tl.histogram(counted, BINS, mask=counted >= 0)
    else:
        total = tl.load(totals_ptr + tl.arange(0, BINS))
        earlier = tl.load(earlier_ptr + block * BINS + tl.arange(0, BINS))
    tiles_of_expert = (total + BLOCK_M - 1) // BLOCK_M
    tile_stop = tl.cumsum(tiles_of_expert, axis=0)
    expert_start = (tile_stop - tiles_of_expert) * BLOCK_M

    # a pair's place: its expert's first, plus the number of earlier pairs of that expert
    rank = tl.gather(earlier, tl.maximum(expert, 0), axis=0)
    for start in range(0 if ONE_KERNEL else first, first + BLOCK, RANK_BLOCK):
        other = start + tl.arange(0, RANK_BLOCK)
        other_expert = tl.load(ids_ptr + other, mask=other < pairs, other=-1).to(tl.int32)
        same = (expert[:, None] == other_expert[None, :]) & (other[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    place = tl.gather(expert_start, tl.maximum(expert, 0), axis=0) + rank
    tl.store(sorted_ptr + place, pair, mask=expert >= 0)

    # an expert's last pair also fills its last tile
    last = (expert >= 0) & (rank + 1 == tl.gather(total, tl.maximum(expert, 0), axis=0))
    empty = tl.where(last, (BLOCK_M - 1) - rank % BLOCK_M, 0)
    for start in range(0, BLOCK_M, 16):
        slot = start + tl.arange(0, 16)
        places = sorted_ptr + (place + 1)[:, None] + slot[None, :]
        tl.store(places, pairs + tl.zeros((BLOCK, 16), dtype=tl.int32), mask=slot[None, :] < empty[:, None])

    used = tl.sum(tiles_of_expert)
    for start in range(block * TILE_BLOCK, tiles, tl.num_programs(0) * TILE_BLOCK):
        tile = start + tl.arange(0, TILE_BLOCK)
        finished = tl.sum((tile_stop[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(expert_of_tile_ptr + tile, tl.where(tile < used, finished, -1), mask=tile < tiles)
