"""Allocation strategies of the paper's ablation table: channels that each layer, then each expert, keeps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.coverage import count_smallest, solve_coverage
from moe_coverage_plugin.core.ragged import sort_descending
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import InterLayer, IntraLayer

U_SHAPE_STRENGTH = 0.35


def channel_budget(total: int, sparsity: float) -> int:
    """Channels to keep of ``total``: ``(1 - sparsity) * total`` to the nearest integer, halves up.

    Raises:
        CoverageError: ``sparsity`` is outside ``[0, 1)`` or NaN.
    """
    if not 0 <= sparsity < 1:
        raise CoverageError(
            f"sparsity is {sparsity}, it must be at least 0 and below 1: give the fraction of channels to remove"
        )
    return math.floor((1 - sparsity) * total + 0.5)


def proportional(weights: Tensor, capacity: int | Tensor, total: int) -> Tensor:
    """Integers proportional to ``weights``, none above its capacity, summing exactly to ``total``.

    What exceeds the capacity of an entry is shared among the others in proportion (water filling). Fractions are
    rounded by largest remainder; of equal remainders the lower index comes first. Entries of weight zero share evenly
    what the others cannot take. Weights that are all zero are treated as equal.

    Args:
        weights: ``[G]``, finite, not negative.
        capacity: one for all, or an integer tensor ``[G]``.
        total: ``0 <= total <= sum of capacities``.

    Returns:
        counts ``[G]`` int64 on the CPU.

    Raises:
        CoverageError: NaN, infinite or negative weights, or a total out of range.
    """
    require_non_negative(weights, "weights", ("group",))
    weights_G = weights.detach().to("cpu", torch.float64)
    capacity_G = torch.as_tensor(capacity).cpu().to(torch.int64).expand(weights_G.shape)
    if not 0 <= total <= int(capacity_G.sum()):
        raise CoverageError(
            f"{total} channels cannot be shared among groups that hold {int(capacity_G.sum())}: choose a sparsity in "
            "[0, 1)"
        )
    counts_G = torch.zeros_like(capacity_G)
    counts_G = _fill_open(counts_G, weights_G, capacity_G, weights_G > 0, total)
    counts_G = _fill_open(counts_G, torch.ones_like(weights_G), capacity_G, weights_G == 0, total)
    assert int(counts_G.sum()) == total
    return counts_G


def _fill_open(counts_G: Tensor, weights_G: Tensor, capacity_G: Tensor, open_G: Tensor, total: int) -> Tensor:
    """Water filling of the ``open`` entries with the rest of ``total``."""
    while bool(open_G.any()):
        rest = total - int(counts_G.sum())
        # divided by the largest first, because the sum of the weights could overflow
        open_weights_G = torch.where(open_G, weights_G / weights_G[open_G].max(), 0.0)
        share_G = rest * (open_weights_G / open_weights_G.sum())
        full_G = open_G & (share_G >= capacity_G)
        if not bool(full_G.any()):
            return counts_G + _round_by_largest_remainder(share_G, rest)
        counts_G = torch.where(full_G, capacity_G, counts_G)
        open_G = open_G & ~full_G
    return counts_G


def _round_by_largest_remainder(share_G: Tensor, total: int) -> Tensor:
    floor_G = share_G.floor().to(torch.int64)
    by_remainder_G = torch.sort(share_G - floor_G, descending=True, stable=True).indices
    floor_G[by_remainder_G[: total - int(floor_G.sum())]] += 1
    return floor_G


def layer_budgets(scores_LEI: Tensor, layer_loss_L: Tensor | None, strategy: InterLayer, sparsity: float) -> Tensor:
    """Channels that each layer keeps.

    ``uniform``: equal. ``u_shaped``: more at both ends, keep ratio proportional to ``1 + 0.35 u`` where ``u`` is
    ``(x - 1/2)^2`` over the depth ``x`` in [0, 1], standardised. ``loss``: proportional to the layer's loss.
    ``coverage``: coverage of the pooled channel scores with the loss as the prior.

    Args:
        scores_LEI: channel scores; only ``coverage`` reads their values.
        layer_loss_L: importance of the layers; needed by ``loss`` and ``coverage``.
        strategy: one of ``InterLayer``.
        sparsity: fraction of the ``L * E * I`` channels to remove, in ``[0, 1)``.

    Returns:
        ``budgets_L`` int64, summing to ``channel_budget(L * E * I, sparsity)``.

    Raises:
        CoverageError: sparsity out of range, no loss where one is needed, or NaN, infinite or negative input.
    """
    layers, experts, channels = scores_LEI.shape
    total = channel_budget(scores_LEI.numel(), sparsity)
    match strategy:
        case "uniform":
            return proportional(torch.ones(layers), experts * channels, total)
        case "u_shaped":
            return proportional(_u_shape(layers), experts * channels, total)
        case "loss":
            return proportional(_required(layer_loss_L, "layer", strategy), experts * channels, total)
        case "coverage":
            require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
            return solve_coverage(scores_LEI.flatten(1), _required(layer_loss_L, "layer", strategy), total)


def _u_shape(layers: int) -> Tensor:
    bowl_L = (torch.linspace(0, 1, layers, dtype=torch.float64) - 0.5).square()
    spread = bowl_L.std(correction=0)
    if float(spread) == 0:  # one or two layers are equally far from the middle
        return torch.ones(layers, dtype=torch.float64)
    return (1 + U_SHAPE_STRENGTH * (bowl_L - bowl_L.mean()) / spread).clamp(min=0)


def expert_widths(scores_LEI: Tensor, budgets_L: Tensor, prior_LE: Tensor | None, strategy: IntraLayer) -> Tensor:
    """Channels that each expert keeps of its layer's budget.

    ``uniform``: equal. ``loss``, ``router_weight``, ``usage``: proportional to the given prior, which the caller
    takes from the measurement of that name. ``topk_channel``: the best channels of the layer, of whichever experts.
    ``coverage``: coverage of each expert's channel scores with the prior as ``phi``.

    Args:
        scores_LEI: channel scores; only ``topk_channel`` and ``coverage`` read their values.
        budgets_L: integer, each between 0 and ``E * I``.
        prior_LE: importance of the experts; ``uniform`` and ``topk_channel`` do not read it.
        strategy: one of ``IntraLayer``.

    Returns:
        ``widths_LE`` int64 whose rows sum to ``budgets_L``.

    Raises:
        CoverageError: no prior where one is needed, a budget out of range, or NaN, infinite or negative input.
    """
    channels = scores_LEI.shape[-1]
    match strategy:
        case "uniform":
            return _proportional_rows(torch.ones(scores_LEI.shape[:2]), channels, budgets_L)
        case "loss" | "router_weight" | "usage":
            prior_LE = _required(prior_LE, "expert", strategy)
            require_non_negative(prior_LE, "expert importances", ("layer", "expert"))
            return _proportional_rows(prior_LE, channels, budgets_L)
        case "topk_channel":
            require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
            rows = zip(scores_LEI, budgets_L.tolist(), strict=True)
            return torch.stack([count_smallest(-sort_descending(scores_EI), budget) for scores_EI, budget in rows])
        case "coverage":
            prior_LE = _required(prior_LE, "expert", strategy)
            require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
            require_non_negative(prior_LE, "expert importances", ("layer", "expert"))
            return solve_coverage(scores_LEI, prior_LE, budgets_L)


def _proportional_rows(weights_LE: Tensor, capacity: int, budgets_L: Tensor) -> Tensor:
    rows = zip(weights_LE, budgets_L.tolist(), strict=True)
    return torch.stack([proportional(weights_E, capacity, budget) for weights_E, budget in rows])


def _required(importance: Tensor | None, level: str, strategy: str) -> Tensor:
    if importance is None:
        raise CoverageError(
            f"strategy {strategy!r} needs the importance of every {level}, which was not measured: let "
            "AttributionModifier measure it, or choose a strategy that needs none"
        )
    return importance
