"""Alignment of expert widths to blocks: kernels and quantization groups want multiples.

:func:`align_widths` rounds given widths (AAR, paper appendix), :func:`align_blocks` chooses the best blocks instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.coverage import count_smallest
from moe_coverage_plugin.core.ragged import prefix_scores, sort_descending
from moe_coverage_plugin.manifest import CoverageError

RemainderRule = Literal["l-r-c", "l-r-s"]
AlignmentStrategy = Literal["hamilton", "blocks"]


class Alignment(NamedTuple):
    """Aligned widths and what aligning cost.

    Attributes:
        widths_LE: int64, multiples of the block size.
        unspent: channels of the budget that no block could use, over all layers.
        dropped: ``(layer, expert)`` of every expert that had channels before and has none now.
    """

    widths_LE: Tensor
    unspent: int
    dropped: list[tuple[int, int]]


def align_widths(
    widths_LE: Tensor, scores_LEI: Tensor, block_size: int, min_width: int, rule: RemainderRule
) -> Alignment:
    """Drop small experts, floor the others to blocks, and hand the freed blocks out by Hamilton's largest remainder.

    In every layer: experts with fewer than ``min_width`` channels are dropped; the others are floored to multiples of
    ``block_size``; the channels so freed (dropped ones too) make whole blocks, which go one each to the experts with
    the largest remainders, never to a dropped expert and never above ``I``. Equal remainders are served in the order
    of the expert.

    Args:
        widths_LE: integer, ``0 <= width <= I``.
        scores_LEI: channel scores; only ``l-r-s`` reads their values.
        block_size: ``a``, a divisor of ``I``; 1 aligns nothing and still drops.
        min_width: ``m``, at most ``a`` or a multiple of it, so that no survivor ends below it.
        rule: remainder by channels (``l-r-c``: ``N mod a``) or by score (``l-r-s``: the score of the channels between
            the floor and ``N``).

    Raises:
        CoverageError: a block size that does not divide ``I``, a minimum that flooring would undercut, or NaN,
            infinite or negative scores under ``l-r-s``.
    """
    channels = scores_LEI.shape[-1]
    check_alignment(block_size, min_width, channels)
    before_LE = widths_LE.detach().to("cpu", torch.int64)
    assert before_LE.shape == scores_LEI.shape[:-1]
    assert bool(((before_LE >= 0) & (before_LE <= channels)).all())

    alive_LE = before_LE >= max(min_width, 1)
    floor_LE = torch.where(alive_LE, before_LE - before_LE % block_size, 0)
    freed_blocks_L = (before_LE - floor_LE).sum(-1) // block_size

    remainder_LE = _remainders(before_LE, floor_LE, scores_LEI, rule)
    eligible_LE = alive_LE & (floor_LE + block_size <= channels)
    by_remainder_LE = remainder_LE.masked_fill(~eligible_LE, -torch.inf).sort(descending=True, stable=True).indices
    position_LE = by_remainder_LE.argsort()
    gains_LE = eligible_LE & (position_LE < freed_blocks_L[:, None])
    aligned_LE = floor_LE + block_size * gains_LE

    dropped = ((before_LE > 0) & (aligned_LE == 0)).nonzero().tolist()
    unspent = int(before_LE.sum() - aligned_LE.sum())
    return Alignment(aligned_LE, unspent, [(layer, expert) for layer, expert in dropped])


def _remainders(before_LE: Tensor, floor_LE: Tensor, scores_LEI: Tensor, rule: RemainderRule) -> Tensor:
    if rule == "l-r-c":
        return (before_LE - floor_LE).double()
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    ends_LE2 = torch.stack([floor_LE, before_LE], dim=-1)
    # Layer by layer, so that the prefix sums stay in the cache.
    rows = zip(scores_LEI, ends_LE2, strict=True)
    return torch.stack(
        [prefix_scores(scores_EI).gather(-1, ends_E2).diff().squeeze(-1) for scores_EI, ends_E2 in rows]
    )


def align_blocks(
    widths_LE: Tensor,
    scores_LEI: Tensor,
    block_size: int,
    live_L: Sequence[int],
    across_layers: bool,
    groups_L: Sequence[int] | None = None,
) -> Alignment:
    """The aligned widths that keep the largest score, with as many channels as ``widths_LE`` has, in whole blocks.

    Maximises ``sum_le S_le(N_le)`` over ``N_le in {0, a, 2a, ..., I}`` subject to ``sum N_le <= sum widths_LE``, in
    each layer or over all of them, and to at least ``live`` experts with ``N_le > 0`` in every layer, or in each group
    of its router.

    Block ``j`` of an expert holds its channels number ``j a + 1 .. (j + 1) a`` in the order of their scores, so the
    scores ``S((j + 1) a) - S(j a)`` of an expert's blocks do not increase with ``j``, and the best blocks overall
    always form a prefix of every expert: taking them one by one is optimal. The experts that a router needs enter
    first, with their best block: an optimum that leaves one of the ``live`` best first blocks of a group out would not
    lose by exchanging a last block of that group for it. Equal scores are served in the order of the block, then
    of the expert.

    Args:
        widths_LE: integer; only their sums are read, over each layer or over all.
        scores_LEI: channel scores, finite and not negative.
        block_size: ``a``, a divisor of ``I``.
        live_L: experts that each group of a layer's router needs: as many as it picks, where there is one group.
        across_layers: blocks of different layers compete; needs scores on one scale.
        groups_L: equal parts that the router of each layer sorts its experts into; ``None``: it does not.

    Raises:
        CoverageError: a block size that does not divide ``I``, NaN, infinite or negative scores, or a budget below
            the blocks that the routers need.
    """
    layers, experts, channels = scores_LEI.shape
    check_alignment(block_size, 0, channels)
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    before_LE = widths_LE.detach().to("cpu", torch.int64)
    assert before_LE.shape == scores_LEI.shape[:-1]

    # [L, E, blocks]: what each block of an expert adds
    blocks_LEJ = sort_descending(scores_LEI).unflatten(-1, (-1, block_size)).sum(-1)
    first_LE = blocks_LEJ[..., 0]
    reserved_LE = torch.zeros_like(first_LE, dtype=torch.bool)
    for layer, (live, groups) in enumerate(zip(live_L, groups_L or [1] * layers, strict=True)):
        best_GE = torch.sort(first_LE[layer].unflatten(0, (groups, -1)), descending=True, stable=True).indices
        reserved_LE[layer].unflatten(0, (groups, -1)).scatter_(1, best_GE[:, :live], True)

    # across layers the model is one problem, otherwise each layer is one
    problems = 1 if across_layers else layers
    blocks_GEJ, reserved_GE = (
        blocks_LEJ.reshape(problems, -1, channels // block_size),
        reserved_LE.reshape(problems, -1),
    )
    budgets_G = (before_LE.reshape(problems, -1).sum(-1) // block_size).tolist()
    counts_GE = [_best_blocks(*problem) for problem in zip(blocks_GEJ, reserved_GE, budgets_G, strict=True)]
    aligned_LE = torch.stack(counts_GE).reshape(layers, experts) * block_size
    dropped = ((before_LE > 0) & (aligned_LE == 0)).nonzero().tolist()
    unspent = int(before_LE.sum() - aligned_LE.sum())
    return Alignment(aligned_LE, unspent, [(layer, expert) for layer, expert in dropped])


def _best_blocks(blocks_EJ: Tensor, reserved_E: Tensor, budget: int) -> Tensor:
    """How many blocks each expert keeps when reserved experts keep at least one."""
    needed = int(reserved_E.sum())
    if budget < needed:
        raise CoverageError(
            f"{budget} blocks are too few for {needed} experts that routers need: lower sparsity or block_size"
        )
    blocks_EJ = blocks_EJ.clone()
    blocks_EJ[reserved_E, 0] = torch.inf
    return count_smallest(-blocks_EJ, budget)


def check_alignment(block_size: int, min_width: int, channels: int) -> None:
    """Refuse settings that :func:`align_widths` cannot honour for experts of ``channels`` channels.

    Raises:
        CoverageError: names the values that would do.
    """
    if block_size < 1 or channels % block_size:
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        raise CoverageError(
            f"block size {block_size} does not divide the {channels} channels of an expert: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    if min_width < 0 or (min_width > block_size and min_width % block_size):
        above = min_width + -min_width % block_size
        raise CoverageError(
            f"minimum width {min_width} is neither between 0 and the block size {block_size} nor a multiple of it, so "
            f"aligned experts could end below it: choose {max(above - block_size, 0)} or {max(above, block_size)}"
        )
