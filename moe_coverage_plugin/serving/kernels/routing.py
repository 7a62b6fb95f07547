"""Sorts pairs of token and slot by expert into tiles, so that each tile needs the weights of one expert.

Pair ``token * K + slot`` is a routed row. The pairs of each expert keep their order and are padded to whole tiles of
``block_m`` pairs. Nothing is counted on the host: all sizes are upper bounds that follow from shapes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_coverage_plugin.serving.kernels.dependent_launch import launch_options, wait_for_previous_kernel
from moe_coverage_plugin.serving.kernels.expert_table import COLUMNS, WIDTH, known_expert

next_power_of_2 = cache(triton.next_power_of_2)
"""Triton's own function takes 4 µs a call, because kernels can call it, too; so does its ``cdiv``."""

ONE_KERNEL_LIMITS = ((64, 64), (1024, 1024))
"""Numbers of pairs up to which one kernel sorts, and the number that it counts per step.

Each of its programs counts all pairs, which takes less time than two more launches.
"""

PAIRS_PER_PROGRAM, MANY_PAIRS_PER_PROGRAM = 64, 128
"""Pairs that one program sorts, with one kernel and with three."""

# Earlier pairs that a program compares with its own in one step: 64 * 64 or 128 * 32 comparisons are 32 registers for
# each of 128 threads.
COMPARED_PER_STEP, COMPARED_PER_STEP_OF_MANY = 64, 32
TILES_PER_STEP, EXPERTS_PER_PROGRAM, PROGRAMS_PER_STEP = 64, 16, 128


class Routing(NamedTuple):
    """Pairs in tiles.

    Attributes:
        sorted_pairs: int32 ``[tiles * block_m]``, the pairs of each tile; the number of pairs marks padding. Not
            defined beyond the last used tile.
        expert_of_tile: int32 ``[tiles]``, -1 for unused tiles, which come last.
    """

    sorted_pairs: Tensor
    expert_of_tile: Tensor


def max_tiles(num_pairs: int, experts: int, block_m: int) -> int:
    """The most tiles that a routing can need: a first one for each expert that gets pairs, and full ones."""
    first_tiles = min(num_pairs, experts)
    return first_tiles + (num_pairs - first_tiles) // block_m


def routing_bytes(experts: int) -> int:
    """Bytes that ``route`` allocates for each pair, except for the padding of tiles."""
    # a sorted pair, its share of the counts of three kernels, and at most its share of a tile of 16 pairs
    return 4 + -(-4 * next_power_of_2(experts) // MANY_PAIRS_PER_PROGRAM) + 1


def one_kernel_step(num_pairs: int) -> int | None:
    """Pairs that the only kernel counts per step, ``None`` if three kernels sort them."""
    return next((step for limit, step in ONE_KERNEL_LIMITS if num_pairs <= limit), None)


def route(topk_ids_TK: Tensor, table_E4: Tensor, block_m: int, min_width: int = 1) -> Routing:
    """Sort pairs into tiles. The sort is stable, so equal inputs give equal tiles.

    Tested against a loop over experts in ``tests/serving/kernels/test_routing.py``.

    Args:
        topk_ids_TK: integer experts, contiguous. Numbers that no expert has, and experts narrower than ``min_width``,
            get no tile.
        table_E4: see ``TableRow``.
        block_m: pairs per tile, a power of two.
        min_width: 1, or 0 if experts of width 0 have a bias to add.
    """
    num_pairs, experts, device = topk_ids_TK.numel(), table_E4.shape[0], topk_ids_TK.device
    tiles = max_tiles(num_pairs, experts, block_m)
    routing = Routing(
        torch.empty(tiles * block_m, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    counted_per_step = one_kernel_step(num_pairs)
    one_kernel = counted_per_step is not None
    pairs_per_program = PAIRS_PER_PROGRAM if one_kernel else MANY_PAIRS_PER_PROGRAM
    programs, bins = -(-num_pairs // pairs_per_program), next_power_of_2(experts)
    options = launch_options(device)
    totals_E = earlier_ME = topk_ids_TK  # not read by the only kernel
    if not one_kernel:
        earlier_ME = torch.empty(programs, bins, dtype=torch.int32, device=device)
        totals_E = torch.empty(bins, dtype=torch.int32, device=device)
        _histogram_kernel[(programs,)](
            *(topk_ids_TK, table_E4, earlier_ME, num_pairs),
            NUM_EXPERTS=experts,
            MIN_WIDTH=min_width,
            PAIRS_PER_PROGRAM=pairs_per_program,
            BINS=bins,
            **options,
        )
        _prefix_sum_kernel[(-(-bins // EXPERTS_PER_PROGRAM),)](
            *(earlier_ME, totals_E, programs),
            PROGRAMS_PER_STEP=PROGRAMS_PER_STEP,
            EXPERTS_PER_PROGRAM=EXPERTS_PER_PROGRAM,
            BINS=bins,
            **options,
        )
    _scatter_kernel[(programs,)](
        *(topk_ids_TK, table_E4, earlier_ME, totals_E, *routing, num_pairs, tiles),
        ONE_KERNEL=one_kernel,
        NUM_EXPERTS=experts,
        MIN_WIDTH=min_width,
        BLOCK_M=block_m,
        PAIRS_PER_PROGRAM=pairs_per_program,
        COUNTED_PER_STEP=counted_per_step or 0,
        COMPARED_PER_STEP=COMPARED_PER_STEP if one_kernel else COMPARED_PER_STEP_OF_MANY,
        TILES_PER_STEP=TILES_PER_STEP,
        BINS=bins,
        **options,
    )
    return routing


@triton.jit
def _load_experts(ids_ptr, table_ptr, pair, num_pairs, NUM_EXPERTS: tl.constexpr, MIN_WIDTH: tl.constexpr):
    """Load the experts of pairs, -1 for pairs that get no tile."""
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    expert = known_expert(expert, NUM_EXPERTS).to(tl.int32)
    width = tl.load(table_ptr + expert * COLUMNS + WIDTH, mask=expert >= 0, other=-1)
    return tl.where(width >= MIN_WIDTH, expert, -1)


@triton.jit(do_not_specialize=["num_pairs"])
def _histogram_kernel(
    ids_ptr, table_ptr, counts_ptr, num_pairs,
    NUM_EXPERTS: tl.constexpr, MIN_WIDTH: tl.constexpr, PAIRS_PER_PROGRAM: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``counts[program, expert]``: the number of pairs of each expert among the pairs of each program.

    Grid: one program per ``PAIRS_PER_PROGRAM`` pairs.

    Pointers:
        ids_ptr: integer ``[num_pairs]``, experts of pairs.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        counts_ptr: int32 ``[programs, BINS]``; ``BINS`` is the number of experts, rounded up to a power of two.
    """
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    pair_M = program * PAIRS_PER_PROGRAM + tl.arange(0, PAIRS_PER_PROGRAM)
    expert_M = _load_experts(ids_ptr, table_ptr, pair_M, num_pairs, NUM_EXPERTS, MIN_WIDTH)
    tl.store(counts_ptr + program * BINS + tl.arange(0, BINS), tl.histogram(expert_M, BINS, mask=expert_M >= 0))


@triton.jit(do_not_specialize=["programs"])
def _prefix_sum_kernel(
    counts_ptr, totals_ptr, programs,
    PROGRAMS_PER_STEP: tl.constexpr, EXPERTS_PER_PROGRAM: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace ``counts[program, expert]`` by its exclusive prefix sum over programs, and write ``totals[expert]``.

    Grid: one program per ``EXPERTS_PER_PROGRAM`` of the ``BINS`` experts. It adds the counts of
    ``PROGRAMS_PER_STEP`` programs at a time.

    Pointers:
        counts_ptr: int32 ``[programs, BINS]`` of ``_histogram_kernel``, overwritten.
        totals_ptr: int32 ``[BINS]``.
    """
    wait_for_previous_kernel(PDL)
    expert_E = tl.program_id(0) * EXPERTS_PER_PROGRAM + tl.arange(0, EXPERTS_PER_PROGRAM)
    total_E = tl.zeros((EXPERTS_PER_PROGRAM,), dtype=tl.int32)
    for first in range(0, programs, PROGRAMS_PER_STEP):
        program_M = first + tl.arange(0, PROGRAMS_PER_STEP)
        counts_ptrs = counts_ptr + program_M[:, None] * BINS + expert_E[None, :]
        mask = (program_M < programs)[:, None] & (expert_E < BINS)[None, :]
        counts_ME = tl.load(counts_ptrs, mask=mask, other=0)
        tl.store(counts_ptrs, total_E[None, :] + tl.cumsum(counts_ME, axis=0) - counts_ME, mask=mask)
        total_E += tl.sum(counts_ME, axis=0)
    tl.store(totals_ptr + expert_E, total_E, mask=expert_E < BINS)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _scatter_kernel(
    ids_ptr, table_ptr, earlier_ptr, totals_ptr, sorted_pairs_ptr, expert_of_tile_ptr, num_pairs, num_tiles,
    ONE_KERNEL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MIN_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    PAIRS_PER_PROGRAM: tl.constexpr, COUNTED_PER_STEP: tl.constexpr, COMPARED_PER_STEP: tl.constexpr,
    TILES_PER_STEP: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``sorted_pairs[first_position[expert(m)] + rank[m]] = m``, padding, and ``expert_of_tile``.

    The rank of a pair is the number of earlier pairs of the same expert; ``first_position`` is a multiple of
    ``BLOCK_M``.

    Grid: one program per ``PAIRS_PER_PROGRAM`` pairs, as many as for ``_histogram_kernel``. Each writes the positions
    of its pairs, the padding behind experts whose last pair is among them, and its share of ``expert_of_tile``. None
    waits for another.

    Pointers:
        ids_ptr: integer ``[num_pairs]``, experts of pairs.
        table_ptr: int64 ``[experts, 4]``, see ``TableRow``.
        earlier_ptr: int32 ``[programs, BINS]`` of ``_prefix_sum_kernel``, read unless ``ONE_KERNEL``.
        totals_ptr: int32 ``[BINS]`` of ``_prefix_sum_kernel``, read unless ``ONE_KERNEL``.
        sorted_pairs_ptr: see ``Routing``.
        expert_of_tile_ptr: see ``Routing``.

    Constants:
        ONE_KERNEL: every program counts all pairs itself, and those before its own.
    """
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    first = program * PAIRS_PER_PROGRAM
    pair_M = first + tl.arange(0, PAIRS_PER_PROGRAM)
    expert_M = _load_experts(ids_ptr, table_ptr, pair_M, num_pairs, NUM_EXPERTS, MIN_WIDTH)

    earlier_E = tl.zeros((BINS,), dtype=tl.int32)
    if ONE_KERNEL:
        total_E = tl.zeros((BINS,), dtype=tl.int32)
        for start in range(0, num_pairs, COUNTED_PER_STEP):
            counted_M = start + tl.arange(0, COUNTED_PER_STEP)
            counted_expert_M = _load_experts(ids_ptr, table_ptr, counted_M, num_pairs, NUM_EXPERTS, MIN_WIDTH)
            total_E += tl.histogram(counted_expert_M, BINS, mask=counted_expert_M >= 0)
            if COUNTED_PER_STEP > PAIRS_PER_PROGRAM:
                # otherwise there is one program
                is_before_M = (counted_expert_M >= 0) & (counted_M < first)
                earlier_E += tl.histogram(counted_expert_M, BINS, mask=is_before_M)
    else:
        total_E = tl.load(totals_ptr + tl.arange(0, BINS))
        earlier_E = tl.load(earlier_ptr + program * BINS + tl.arange(0, BINS))
    tiles_E = (total_E + BLOCK_M - 1) // BLOCK_M
    tile_stop_E = tl.cumsum(tiles_E, axis=0)
    first_position_E = (tile_stop_E - tiles_E) * BLOCK_M

    rank_M = tl.gather(earlier_E, tl.maximum(expert_M, 0), axis=0)
    for start in range(first, first + PAIRS_PER_PROGRAM, COMPARED_PER_STEP):
        other_M = start + tl.arange(0, COMPARED_PER_STEP)
        other_expert_M = tl.load(ids_ptr + other_M, mask=other_M < num_pairs, other=-1)
        if ids_ptr.dtype.element_ty.primitive_bitwidth > 32:
            # otherwise a number that no expert has might become an expert's in 32 bits
            other_expert_M = known_expert(other_expert_M, NUM_EXPERTS)
        other_expert_M = other_expert_M.to(tl.int32)
        is_earlier = (expert_M[:, None] == other_expert_M[None, :]) & (other_M[None, :] < pair_M[:, None])
        rank_M += tl.sum(is_earlier.to(tl.int32), axis=1)
    position_M = tl.gather(first_position_E, tl.maximum(expert_M, 0), axis=0) + rank_M
    tl.store(sorted_pairs_ptr + position_M, pair_M, mask=expert_M >= 0)

    # whoever places the last pair of an expert writes the padding behind it
    is_last_M = (expert_M >= 0) & (rank_M + 1 == tl.gather(total_E, tl.maximum(expert_M, 0), axis=0))
    padding_M = tl.where(is_last_M, (BLOCK_M - 1) - rank_M % BLOCK_M, 0)
    for start in range(0, BLOCK_M, 16):
        offset = start + tl.arange(0, 16)
        padding_ptrs = sorted_pairs_ptr + (position_M + 1)[:, None] + offset[None, :]
        padding = num_pairs + tl.zeros((PAIRS_PER_PROGRAM, 16), dtype=tl.int32)
        tl.store(padding_ptrs, padding, mask=offset[None, :] < padding_M[:, None])

    used_tiles = tl.sum(tiles_E)
    for start in range(program * TILES_PER_STEP, num_tiles, tl.num_programs(0) * TILES_PER_STEP):
        tile = start + tl.arange(0, TILES_PER_STEP)
        expert_of_tile = tl.sum((tile_stop_E[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(expert_of_tile_ptr + tile, tl.where(tile < used_tiles, expert_of_tile, -1), mask=tile < num_tiles)
