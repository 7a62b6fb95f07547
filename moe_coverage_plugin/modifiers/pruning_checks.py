"""What a pruning refuses: a recipe in another order, and plans that a router could not live with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.quip import QuIPModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from torch import Tensor

from moe_coverage_plugin.core.kept_experts import check_kept_experts
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, chooses_by_token_table, experts_needed
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.plan import PlanModifier


def refuse_neighbours(
    before: Sequence[Modifier], after: Sequence[Modifier], pruning: type[Modifier], plans: Sequence[PlanModifier]
) -> None:
    """Refuse modifiers that do not go together with a pruning at its place in the recipe.

    Args:
        plans: what the pruning cuts by.

    Raises:
        CoverageError: naming the modifier and where it belongs.
    """
    if quantizer := next((type(other).__name__ for other in before if isinstance(other, QuantizationMixin)), None):
        raise CoverageError(
            f"{quantizer} stands before ChannelPruningModifier: prune first, then quantize what is left"
        )
    if any(isinstance(other, pruning) for other in before):
        raise CoverageError(
            "the recipe has two ChannelPruningModifier, but scores of pruned experts cannot be compared: prune once, "
            "at the sparsity that is wanted in the end"
        )
    if useless := next((type(other).__name__ for other in after if isinstance(other, PlanModifier)), None):
        raise CoverageError(f"{useless} stands after ChannelPruningModifier, where it changes nothing: put it before")
    planners = [other for other in before if isinstance(other, PlanModifier)]
    if idle := [type(other).__name__ for other in planners if all(other is not plan for plan in plans)]:
        taken = " and ".join(dict.fromkeys(type(plan).__name__ for plan in plans))
        raise CoverageError(
            f"nobody takes the plan of {' and '.join(idle)}, because ChannelPruningModifier cuts by the last {taken} "
            "before it: remove the others"
        )
    _refuse_transforms([*before, *after])
    first = next(index for index, other in enumerate(before) if isinstance(other, AttributionModifier))
    if any(isinstance(other, REAPPruningModifier) for other in (*before[first:], *after)):
        raise CoverageError(
            "REAPPruningModifier stands after AttributionModifier and would renumber the experts that it scored: put "
            "it before AttributionModifier"
        )


def _refuse_transforms(modifiers: Sequence[Modifier]) -> None:
    if rotating := next((each for each in modifiers if isinstance(each, (SpinQuantModifier, QuIPModifier))), None):
        raise CoverageError(
            f"{type(rotating).__name__} rotates what routers and experts read but no router, and its online rotations "
            "run in experts of unequal width in no engine: remove it, SmoothQuantModifier and AWQModifier go together "
            "with pruning"
        )
    if any(isinstance(each, AWQModifier) for each in modifiers) and not torch.accelerator.is_available():
        raise CoverageError(
            "AWQModifier runs on an accelerator only, and would stop after calibration on this machine, which has "
            "none: use GPTQModifier or QuantizationModifier"
        )


def check_routable(layer: MoELayer, widths_E: Tensor) -> None:
    """Refuse a plan that leaves a router fewer experts than it picks; group-limited routers pick within groups.

    Raises:
        CoverageError: as said, with the layer, or the group, that is too small; or experts removed from a layer whose
            router would choose them all the same.
    """
    check_kept_experts([layer.name], [layer.top_k], widths_E[None])
    live_E = widths_E > 0
    if chooses_by_token_table(layer) and not bool(live_E.all()):
        raise CoverageError(
            f"{layer.name} would lose {int((~live_E).sum())} of {layer.num_experts} experts, but its experts are "
            "chosen by a table of token ids, which no mask of router logits keeps from them: use layout='padded', "
            "which removes none, or list the layer in ignore"
        )
    groups, needed = experts_needed(layer)
    live_G = live_E.reshape(groups, -1).sum(-1)
    if bool((live_G < needed).any()):
        raise CoverageError(
            f"{layer.name} would keep {int(live_G.min())} experts in a group of its router, which needs {needed}: "
            'lower sparsity or min_width, or let AlignmentModifier keep as many by strategy="blocks"'
        )
