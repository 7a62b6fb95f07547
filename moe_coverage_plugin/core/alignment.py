"""Alignment of expert widths to blocks: kernels and quantization groups need multiples.

:func:`align_widths` rounds given widths (AAR, paper appendix), :func:`align_blocks` chooses the best blocks instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.coverage import count_smallest
from moe_coverage_plugin.core.kept_experts import keep_enough, raise_to_minimum
from moe_coverage_plugin.core.ragged import prefix_scores, sort_descending
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import AlignmentOptions, RemainderRule, Scope, check_min_width


class Alignment(NamedTuple):
    """Aligned widths and what aligning cost.

    Attributes:
        widths_LE: int64, multiples of the block size.
        unspent: channels of the budget that are not in any block, over all layers.
        removed: ``(layer, expert)`` of every expert that had channels before alignment and has none after it.
        kept_for_routers: experts that have channels only because routers need them.
        raised_layers: layers whose budget was raised to what their routers need.
    """

    widths_LE: Tensor
    unspent: int
    removed: list[tuple[int, int]]
    kept_for_routers: int = 0
    raised_layers: int = 0


def narrowest_width(options: AlignmentOptions | None) -> int:
    """Return the fewest channels that an expert can keep without being removed; ``None``: widths are not aligned."""
    if options is None:
        return 1
    return max(options.block_size, options.min_width if options.strategy == "hamilton" else 0)


def align(widths_LE: Tensor, scores: AttributionScores, options: AlignmentOptions | None, scope: Scope) -> Alignment:
    """Align planned widths so that every router keeps the experts that it needs.

    :func:`align_blocks` reserves these experts. The widths of :func:`align_widths`, or those that are not aligned, are
    changed only in layers that would keep too few (:func:`keep_enough`). A layer whose budget is below the need of its
    router gets the difference from the others.

    Args:
        widths_LE: planned channels of every expert, int64.
        scores: the scores that they were planned from.
        options: ``None``: any width is allowed.
        scope: whether blocks of different layers compete.

    Raises:
        CoverageError: a block size that does not fit, scores that cannot be used, or a sum of ``widths_LE`` that is
            too small for all routers.
    """
    scores_LEI, routers = scores.channels_LEI, scores.router_needs
    narrowest = narrowest_width(options)
    minima_L = torch.tensor([router.experts * narrowest for router in routers])
    sums_L = widths_LE.detach().to("cpu", torch.int64).sum(-1)
    _require_total(int(sums_L.sum()), int(minima_L.sum()))
    raised = int((sums_L < minima_L).sum())
    budgets_L = raise_to_minimum(sums_L, minima_L)
    if options is not None and options.strategy == "blocks":
        groups_L, needed_L = zip(*routers, strict=True)
        across_layers = scope == "global"
        aligned = align_blocks(
            widths_LE, scores_LEI, options.block_size, needed_L, across_layers, groups_L, budgets_L=budgets_L
        )
        return aligned._replace(raised_layers=0 if across_layers else raised)
    if options is None:
        aligned, block_size = Alignment(widths_LE, 0, []), 1
    else:
        block_size = options.block_size
        aligned = align_widths(widths_LE, scores_LEI, block_size, options.min_width, options.rule)
    kept_LE = keep_enough(aligned.widths_LE, scores_LEI, budgets_L, routers, narrowest, block_size)
    added = int(((kept_LE > 0) & (aligned.widths_LE == 0)).sum())
    return _alignment(widths_LE, kept_LE)._replace(kept_for_routers=added, raised_layers=raised)


def _require_total(budget: int, needed: int) -> None:
    if budget < needed:
        raise CoverageError(
            f"{budget} channels are too few for the experts that routers need, which keep at least {needed}: lower "
            "sparsity"
        )


def _alignment(before_LE: Tensor, aligned_LE: Tensor) -> Alignment:
    removed = ((before_LE > 0) & (aligned_LE == 0)).nonzero().tolist()
    unspent = int(before_LE.sum() - aligned_LE.sum())
    return Alignment(aligned_LE, unspent, [(layer, expert) for layer, expert in removed])


def align_widths(
    widths_LE: Tensor, scores_LEI: Tensor, block_size: int, min_width: int, rule: RemainderRule
) -> Alignment:
    """Remove small experts, floor the others to blocks, and assign the freed blocks by Hamilton's largest remainder.

    In every layer, experts with fewer than ``min_width`` channels are removed, and the others are floored to multiples
    of ``block_size``. The freed channels, including those of removed experts, make whole blocks. The experts with the
    largest remainders get one block each; a removed expert gets none, and no expert exceeds ``I``. Of equal
    remainders the lower expert index comes first (paper, appendix on alignment-aware redistribution).

    Args:
        widths_LE: integer, ``0 <= width <= I``.
        scores_LEI: channel scores; only ``l-r-s`` reads their values.
        block_size: ``a``, a divisor of ``I``; with 1, experts below ``min_width`` are still removed.
        min_width: ``m``, at most ``a`` or a multiple of it, so that no kept expert ends below it.
        rule: remainder in channels (``l-r-c``: ``N mod a``) or in scores (``l-r-s``: the score of the channels
            between the floor and ``N``).

    Raises:
        CoverageError: a block size that does not divide ``I``, a minimum width that flooring would violate, or NaN,
            infinite or negative scores under ``l-r-s``.
    """
    channels = scores_LEI.shape[-1]
    check_alignment(block_size, min_width, channels)
    before_LE = widths_LE.detach().to("cpu", torch.int64)
    assert before_LE.shape == scores_LEI.shape[:-1]
    assert bool(((before_LE >= 0) & (before_LE <= channels)).all())

    kept_LE = before_LE >= max(min_width, 1)
    floor_LE = torch.where(kept_LE, before_LE - before_LE % block_size, 0)
    freed_blocks_L = (before_LE - floor_LE).sum(-1) // block_size

    remainder_LE = _remainders(before_LE, floor_LE, scores_LEI, rule)
    eligible_LE = kept_LE & (floor_LE + block_size <= channels)
    by_remainder_LE = remainder_LE.masked_fill(~eligible_LE, -torch.inf).sort(descending=True, stable=True).indices
    position_LE = by_remainder_LE.argsort()
    gains_LE = eligible_LE & (position_LE < freed_blocks_L[:, None])
    aligned_LE = floor_LE + block_size * gains_LE

    return _alignment(before_LE, aligned_LE)


def _remainders(before_LE: Tensor, floor_LE: Tensor, scores_LEI: Tensor, rule: RemainderRule) -> Tensor:
    if rule == "l-r-c":
        return (before_LE - floor_LE).double()
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    ends_LE2 = torch.stack([floor_LE, before_LE], dim=-1)
    # layer by layer, so that the prefix sums stay in the cache
    rows = zip(scores_LEI, ends_LE2, strict=True)
    return torch.stack(
        [prefix_scores(scores_EI).gather(-1, ends_E2).diff().squeeze(-1) for scores_EI, ends_E2 in rows]
    )


def align_blocks(
    widths_LE: Tensor,
    scores_LEI: Tensor,
    block_size: int,
    needed_L: Sequence[int],
    across_layers: bool,
    groups_L: Sequence[int] | None = None,
    budgets_L: Tensor | None = None,
) -> Alignment:
    """Aligned widths with the largest kept score, within the number of channels of ``widths_LE``.

    Maximises ``sum_le S_le(N_le)`` over ``N_le in {0, a, 2a, ..., I}`` subject to ``sum N_le <= sum widths_LE``, in
    each layer or over all layers, and to at least ``needed`` experts with ``N_le > 0`` in every group of a layer's
    router.

    Block ``j`` of an expert is its channels number ``j a + 1 .. (j + 1) a`` in the order of their scores, so the
    scores ``S((j + 1) a) - S(j a)`` of its blocks do not increase with ``j``. The best blocks overall are therefore a
    prefix of every expert, and a greedy choice is optimal. The experts that a router needs get their first block
    before that: if an optimum lacked one of the ``needed`` best first blocks of a group, exchanging a last block of
    that group for it would not lower the score. Of equal scores the lower block index comes first, then the lower
    expert index.

    Args:
        widths_LE: integer; only their sums are read, over each layer or over all layers.
        scores_LEI: channel scores, finite and not negative.
        block_size: ``a``, a divisor of ``I``.
        needed_L: kept experts that each group of a layer's router needs: its top-k if there is one group.
        across_layers: whether blocks of different layers compete, which needs scores on one scale.
        groups_L: number of equal groups of experts in each layer's router; ``None``: one.
        budgets_L: channels of each layer, int64; ``None``: the sums of ``widths_LE``.

    Raises:
        CoverageError: a block size that does not divide ``I``, NaN, infinite or negative scores, or a budget below
            the blocks that the routers need.
    """
    layers, experts, channels = scores_LEI.shape
    check_alignment(block_size, 0, channels)
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    before_LE = widths_LE.detach().to("cpu", torch.int64)
    assert before_LE.shape == scores_LEI.shape[:-1]

    # the score of each block
    blocks_LEJ = sort_descending(scores_LEI).unflatten(-1, (-1, block_size)).sum(-1)
    first_LE = blocks_LEJ[..., 0]
    reserved_LE = torch.zeros_like(first_LE, dtype=torch.bool)
    for layer, (needed, groups) in enumerate(zip(needed_L, groups_L or [1] * layers, strict=True)):
        best_GE = torch.sort(first_LE[layer].unflatten(0, (groups, -1)), descending=True, stable=True).indices
        reserved_LE[layer].unflatten(0, (groups, -1)).scatter_(1, best_GE[:, :needed], True)

    # across layers the model is one problem, otherwise each layer is one
    problems = 1 if across_layers else layers
    blocks_GEJ, reserved_GE = (
        blocks_LEJ.reshape(problems, -1, channels // block_size),
        reserved_LE.reshape(problems, -1),
    )
    budgets_L = before_LE.sum(-1) if budgets_L is None else budgets_L
    budgets_G = (budgets_L.reshape(problems, -1).sum(-1) // block_size).tolist()
    counts_GE = [_best_blocks(*problem) for problem in zip(blocks_GEJ, reserved_GE, budgets_G, strict=True)]
    aligned_LE = torch.stack(counts_GE).reshape(layers, experts) * block_size
    return _alignment(before_LE, aligned_LE)


def _best_blocks(blocks_EJ: Tensor, reserved_E: Tensor, budget: int) -> Tensor:
    """Number of blocks that each expert keeps, at least one for reserved experts."""
    needed = int(reserved_E.sum())
    if budget < needed:
        raise CoverageError(
            f"{budget} blocks are too few for {needed} experts that routers need: lower sparsity or block_size"
        )
    blocks_EJ = blocks_EJ.clone()
    blocks_EJ[reserved_E, 0] = torch.inf
    return count_smallest(-blocks_EJ, budget)


def check_alignment(block_size: int, min_width: int, channels: int) -> None:
    """Check that experts of ``channels`` channels can be aligned with these settings.

    Raises:
        CoverageError: they cannot; the message lists valid values.
    """
    if block_size < 1 or channels % block_size:
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        raise CoverageError(
            f"block size {block_size} does not divide the {channels} channels of an expert: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    check_min_width(block_size, min_width)
