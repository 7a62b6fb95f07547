"""Checks of the recipe around a pruning, and of the routers whose experts it may remove."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.quip import QuIPModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer
from moe_coverage_plugin.modeling.router_mask import check_maskable
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.plan import PlanModifier


def refuse_neighbours(
    before: Sequence[Modifier], after: Sequence[Modifier], pruning: type[Modifier], plans: Sequence[PlanModifier]
) -> None:
    """Stop if a modifier does not go together with a pruning at its place in the recipe.

    Args:
        before: modifiers before the pruning.
        after: modifiers after the pruning.
        pruning: class of the pruning modifier.
        plans: the modifiers whose plan the pruning uses.

    Raises:
        CoverageError: names the modifier and its place.
    """
    if quantizer := next((type(other).__name__ for other in before if isinstance(other, QuantizationMixin)), None):
        raise CoverageError(
            f"{quantizer} is before ChannelPruningModifier in the recipe: prune first, then quantize what is left"
        )
    if any(isinstance(other, pruning) for other in before):
        raise CoverageError(
            "the recipe has two ChannelPruningModifier, but scores of pruned experts cannot be compared: prune once, "
            "at the sparsity that you want in the end"
        )
    if useless := next((type(other).__name__ for other in after if isinstance(other, PlanModifier)), None):
        raise CoverageError(f"{useless} is after ChannelPruningModifier, where it has no effect: put it before")
    planners = [other for other in before if isinstance(other, PlanModifier)]
    if idle := [type(other).__name__ for other in planners if all(other is not plan for plan in plans)]:
        used = " and ".join(dict.fromkeys(type(plan).__name__ for plan in plans))
        raise CoverageError(
            f"no modifier uses the plan of {' and '.join(idle)}, because ChannelPruningModifier uses the last {used} "
            "before it: remove the others"
        )
    _refuse_transforms([*before, *after])
    first = next(index for index, other in enumerate(before) if isinstance(other, AttributionModifier))
    if any(isinstance(other, REAPPruningModifier) for other in (*before[first:], *after)):
        raise CoverageError(
            "REAPPruningModifier is after AttributionModifier and would renumber the experts that it scored: put it "
            "before AttributionModifier"
        )


def _refuse_transforms(modifiers: Sequence[Modifier]) -> None:
    if rotating := next((each for each in modifiers if isinstance(each, (SpinQuantModifier, QuIPModifier))), None):
        raise CoverageError(
            f"{type(rotating).__name__} rotates the input of routers and experts but not the routers, and no engine "
            "runs its online rotations in experts of unequal width: remove it, or use SmoothQuantModifier or "
            "AWQModifier"
        )
    if any(isinstance(each, AWQModifier) for each in modifiers) and not torch.accelerator.is_available():
        raise CoverageError(
            "AWQModifier runs on an accelerator only, and would stop after calibration on this machine, which has "
            "none: use GPTQModifier or QuantizationModifier"
        )


def check_routers(layers: Sequence[MoELayer]) -> None:
    """Check that removed experts can be masked in all routers; see :func:`check_maskable`.

    Raises:
        CoverageError: names the first router that cannot be masked.
    """
    for layer in layers:
        check_maskable(layer)
