"""Leaves every router enough experts to pick from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.allocation import proportional
from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.ragged import prefix_scores
from moe_coverage_plugin.manifest import CoverageError


class RouterNeeds(NamedTuple):
    """The experts that a router cannot do without.

    Attributes:
        groups: equal groups of its experts, in order; 1 without groups.
        needed: experts that every group must keep: the top-k if there is one group, all experts if a table of token
            ids chooses them.
    """

    groups: int
    needed: int

    @property
    def experts(self) -> int:
        """Experts that the layer must keep."""
        return self.groups * self.needed


def check_kept_experts(names: Sequence[str], top_k: Sequence[int], widths_LE: Tensor) -> None:
    """Check that every layer keeps at least as many experts as its router picks for a token.

    Args:
        names: module path of the experts of each layer, for the message.
        top_k: experts that the router of each layer picks.
        widths_LE: kept channels; 0 removes an expert.

    Raises:
        CoverageError: a layer keeps fewer; the message names it.
    """
    kept_L = (widths_LE > 0).sum(-1)
    for name, kept, picked in zip(names, kept_L.tolist(), top_k, strict=True):
        if kept < picked:
            raise CoverageError(
                f"{name} would keep {kept} experts but its router picks {picked} for every token: lower sparsity"
            )


def raise_to_minimum(budgets_L: Tensor, minima_L: Tensor) -> Tensor:
    """Raise the budgets that are below a minimum, at the cost of the others, in proportion to what they have above it.

    Args:
        budgets_L: channels of each layer, int64.
        minima_L: fewest channels of each layer, int64; their sum is at most that of the budgets.

    Returns:
        budgets ``[L]`` of the same sum, int64.
    """
    missing_L, excess_L = (minima_L - budgets_L).clamp(min=0), (budgets_L - minima_L).clamp(min=0)
    if not bool(missing_L.any()):
        return budgets_L
    return budgets_L + missing_L - proportional(excess_L.double(), excess_L, int(missing_L.sum()))


def keep_enough(
    widths_LE: Tensor,
    scores_LEI: Tensor,
    budgets_L: Tensor,
    routers: Sequence[RouterNeeds],
    narrowest: int,
    block_size: int,
) -> Tensor:
    """Keep experts that a plan removes although routers need them, within the budget of every layer.

    In each group that keeps too few, the removed experts with the highest scores keep ``narrowest`` channels. The
    channels come from the experts of the layer whose blocks have the lowest scores. Other layers are unchanged.

    Args:
        widths_LE: int64, each 0 or at least ``narrowest``, in multiples of ``block_size``.
        scores_LEI: channel scores, finite and not negative.
        budgets_L: most channels that each layer may keep, at least ``narrowest`` for each expert that it needs.
        routers: what the router of each layer needs.
        narrowest: fewest channels of a kept expert, a multiple of ``block_size``.
        block_size: channels that are taken from an expert at once.

    Returns:
        widths ``[L, E]``, int64.
    """
    widths_LE = widths_LE.clone()
    for layer, (widths_E, router) in enumerate(zip(widths_LE, routers, strict=True)):
        kept_G = (widths_E > 0).unflatten(0, (router.groups, -1)).sum(-1)
        if bool((kept_G >= router.needed).all()) and int(widths_E.sum()) <= int(budgets_L[layer]):
            continue
        require_non_negative(scores_LEI[layer], "channel scores", ("expert",))
        widths_E.copy_(
            _Layer(widths_E, prefix_scores(scores_LEI[layer]), router, narrowest, block_size).fit(
                int(budgets_L[layer])
            )
        )
    return widths_LE


class _Layer:
    """The experts of a layer while some are kept and others give channels away."""

    def __init__(self, widths_E: Tensor, prefix_ED: Tensor, router: RouterNeeds, narrowest: int, block_size: int):
        self._widths, self._prefix = widths_E.tolist(), prefix_ED
        self._needed, self._narrowest, self._block_size = router.needed, narrowest, block_size
        self._size = len(self._widths) // router.groups
        for start in range(0, len(self._widths), self._size):
            self._promote(range(start, start + self._size))

    def _promote(self, group: range) -> None:
        removed = [expert for expert in group if self._widths[expert] == 0]
        removed.sort(key=lambda expert: (-float(self._prefix[expert, self._narrowest]), expert))
        for expert in removed[: max(self._needed - (len(group) - len(removed)), 0)]:
            self._widths[expert] = self._narrowest

    def fit(self, budget: int) -> Tensor:
        """Take the channels above the budget where they cost the least score."""
        while sum(self._widths) > budget:
            _, expert, taken = min(filter(None, map(self._offer, range(len(self._widths)))))
            self._widths[expert] -= taken
        return torch.tensor(self._widths)

    def _offer(self, expert: int) -> tuple[float, int, int] | None:
        """Score per channel, expert and number of the channels that an expert can give."""
        width = self._widths[expert]
        taken = self._block_size if width - self._block_size >= self._narrowest else width
        if taken == width:
            start = expert - expert % self._size
            kept = sum(other > 0 for other in self._widths[start : start + self._size])
            if width == 0 or kept <= self._needed:
                return None
        score = float(self._prefix[expert, width] - self._prefix[expert, width - taken])
        return score / taken, expert, taken
