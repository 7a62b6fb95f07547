"""Coverage-based allocation (CBA, paper section on coverage maximisation), solved exactly by selection.

A group ``g`` (a layer, or an expert) has ``D`` channels with scores; ``S_g(n)`` is the sum of its ``n`` best. For one
common ``alpha`` the paper requires of every group the coverage ``rho_g = min(alpha * phi_g, 1)`` and keeps
``N_g = min{n : S_g(n) >= rho_g * S_g(D)}`` channels. It searches for the largest ``alpha`` that fits the budget.

No search is needed. Channel number ``n`` is kept exactly when ``S_g(n - 1) < rho_g * S_g(D)``, that is,
when ``alpha > S_g(n - 1) / (phi_g * S_g(D))``. These thresholds grow with ``n``, so the solution is the ``budget``
smallest thresholds over all groups. It is exact to the channel; a search stops at a tolerance.

A channel with score zero adds no coverage, so no ``alpha`` requires it. It is kept only if some of the budget is left
over when every channel with a positive score is kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.ragged import sort_descending
from moe_coverage_plugin.manifest import CoverageError


def solve_coverage(scores_GD: Tensor, prior_G: Tensor, budget: int | Tensor) -> Tensor:
    """Channels of every group under the largest common ``alpha`` that fits the budget.

    Among equal thresholds the smaller ``n`` comes first, then the smaller ``g``. Priors that are all zero are treated
    as equal. A group with ``phi_g = 0`` beside groups with positive priors gets only what those cannot use, and
    several such groups share it evenly. Channels with score zero come last of all, evenly over the groups.

    Args:
        scores_GD: finite, not negative, in any order inside a group; or ``[L, G, D]`` for one problem per layer.
        prior_G: ``phi``, finite and not negative; its scale does not matter. ``[L, G]`` for one problem per layer.
        budget: channels to keep, ``0 <= budget <= G * D``; an integer tensor ``[L]`` for one problem per layer.

    Returns:
        counts ``[G]`` (or ``[L, G]``) int64 on the CPU, summing to the budget.

    Raises:
        CoverageError: NaN, infinite or negative scores or priors (names the group), or a budget out of range.
    """
    assert prior_G.shape == scores_GD.shape[:-1]
    axes = ("layer", "group")[3 - scores_GD.ndim :]
    require_non_negative(scores_GD, "channel scores", axes)
    require_non_negative(prior_G, "importances", axes)
    if scores_GD.ndim == 3:
        return _solve_each(scores_GD, prior_G, torch.as_tensor(budget))
    return _solve(scores_GD, prior_G, int(budget))


def coverage_thresholds(sorted_scores_GD: Tensor, prior_G: Tensor) -> Tensor:
    """``S_g(n - 1) / (phi_g * S_g(D))`` for ``n = 1..D``: the ``alpha`` above which channel ``n`` of ``g`` enters.

    Args:
        sorted_scores_GD: float64, descending along the last axis, ``[..., G, D]``.
        prior_G: ``[..., G]``.

    Returns:
        float64 like the scores, not decreasing along the last axis; infinite for channels with score zero, and the
        largest finite number for the other channels of a group with ``phi_g = 0``.
    """
    scores_GD = sorted_scores_GD
    prior_G1 = prior_G.double()[..., None]
    prior_G1 = torch.where((prior_G1 == 0).all(-2, keepdim=True), torch.ones_like(prior_G1), prior_G1)

    # allocated by NumPy, which requests huge pages: page faults would triple the time of this function
    thresholds_GD = torch.from_numpy(np.zeros(scores_GD.shape))
    torch.cumsum(scores_GD[..., :-1], -1, out=thresholds_GD[..., 1:])
    total_G1 = thresholds_GD[..., -1:] + scores_GD[..., -1:]
    # two divisions, because the product phi * S could underflow
    thresholds_GD.div_(_or_one(total_G1)).div_(_or_one(prior_G1))
    if bool((prior_G1 == 0).any()):
        thresholds_GD.masked_fill_(prior_G1 == 0, torch.finfo(thresholds_GD.dtype).max)
    if bool((scores_GD[..., -1] == 0).any()):
        thresholds_GD.masked_fill_(scores_GD == 0, torch.inf)
    return thresholds_GD


def _or_one(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def count_smallest(values_GD: Tensor, budget: int) -> Tensor:
    """Number of the ``budget`` smallest values in each row, if every row ascends.

    Among equal values the smaller column comes first, then the smaller row.

    Args:
        values_GD: float64 on the CPU, not decreasing along the last axis, no NaN.
        budget: ``0 <= budget <= G * D``.

    Returns:
        counts ``[G]`` int64.

    Raises:
        CoverageError: the budget is out of range.
    """
    if not 0 <= budget <= values_GD.numel():
        raise CoverageError(
            f"budget of {budget} channels is outside 0..{values_GD.numel()} ({values_GD.shape[0]} groups of "
            f"{values_GD.shape[1]}): choose a sparsity in [0, 1)"
        )
    if budget == 0:
        return torch.zeros(values_GD.shape[0], dtype=torch.int64)
    kth = float(np.partition(values_GD.reshape(-1).numpy(), budget - 1)[budget - 1])
    kth_G1 = torch.full_like(values_GD[:, :1], kth)
    below_G = torch.searchsorted(values_GD, kth_G1).squeeze(1)
    up_to_G = torch.searchsorted(values_GD, kth_G1, right=True).squeeze(1)
    return _fill_evenly(below_G, up_to_G, budget)


def _fill_evenly(low_G: Tensor, high_G: Tensor, total: int) -> Tensor:
    """Counts between ``low`` and ``high`` that sum to ``total``: one common level, and the rest row by row."""
    level, ceiling = 0, int(high_G.max())
    while level < ceiling:
        middle = (level + ceiling + 1) // 2
        if int(_at_level(middle, low_G, high_G).sum()) <= total:
            level = middle
        else:
            ceiling = middle - 1
    counts_G = _at_level(level, low_G, high_G)
    next_G = (_at_level(level + 1, low_G, high_G) > counts_G).nonzero().squeeze(1)
    counts_G[next_G[: total - int(counts_G.sum())]] += 1
    assert int(counts_G.sum()) == total
    return counts_G


def _at_level(level: int, low_G: Tensor, high_G: Tensor) -> Tensor:
    return torch.full_like(low_G, level).clamp(low_G, high_G)


def _solve_each(scores_LGD: Tensor, prior_LG: Tensor, budget_L: Tensor) -> Tensor:
    # one problem at a time stays in the cache and is faster than one large batch
    problems = zip(scores_LGD, prior_LG, budget_L.tolist(), strict=True)
    return torch.stack([_solve(scores_GD, prior_G, budget) for scores_GD, prior_G, budget in problems])


def _solve(scores_GD: Tensor, prior_G: Tensor, budget: int) -> Tensor:
    return count_smallest(coverage_thresholds(sort_descending(scores_GD), prior_G.cpu()), budget)
