"""Whether a budget is enough for the experts that routers need: known from shapes and options, before any score is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_coverage_plugin.core.alignment import check_alignment, narrowest_width
from moe_coverage_plugin.core.allocation import channel_budget
from moe_coverage_plugin.core.kept_experts import RouterNeeds
from moe_coverage_plugin.core.layouts import uniform_width
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.options import AlignmentOptions, CoverageOptions


def check_budget(
    coverage: CoverageOptions,
    alignment: AlignmentOptions | None,
    layout: Layout,
    routers: Sequence[RouterNeeds],
    experts: int,
    channels: int,
) -> None:
    """Check that every plan with these options can be carried out, whatever the scores are.

    Args:
        coverage: sparsity.
        alignment: ``None``: widths are not aligned.
        layout: how experts will be stored.
        routers: what the router of each pruned layer needs.
        experts: number of experts of each layer.
        channels: channels of an unpruned expert.

    Raises:
        CoverageError: block size or minimum width do not fit the experts, or the budget is too small; names a
            sparsity with which it is not.
    """
    narrowest, block_size = narrowest_width(alignment), alignment.block_size if alignment is not None else 1
    if alignment is not None:
        check_alignment(block_size, alignment.min_width if alignment.strategy == "hamilton" else 0, channels)
    if narrowest > channels:
        assert alignment is not None
        raise CoverageError(
            f"{alignment.spell('min_width', narrowest)} is above the expert width {channels}, so all experts would be "
            f"removed: lower it to at most {channels}"
        )
    total = len(routers) * experts * channels
    budget = channel_budget(total, coverage.sparsity)
    # every expert then has this many channels on average, which is more than routers need
    enough = math.floor(1000 * (1 - narrowest / channels)) / 1000
    needed = sum(router.experts for router in routers) * narrowest
    spelled = coverage.spell("sparsity", coverage.sparsity)
    if budget < needed:
        most = max(router.experts for router in routers)
        raise CoverageError(
            f"{spelled} leaves {budget} of {total} expert channels, but {len(routers)} layers whose routers cannot do "
            f"with fewer than {most} experts need at least {needed}: lower it, for instance to {enough}, which leaves "
            f"every expert {narrowest} on average"
        )
    if layout == "uniform" and uniform_width(budget, len(routers) * experts, block_size) == 0:
        raise CoverageError(
            f"layout='uniform' with {spelled} would give every expert less than one block of {block_size} channels: "
            f"lower sparsity, for instance to {enough}"
        )
