"""What a recipe would stop at when it initializes, found before a model writes its own calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from llmcompressor.modifiers import Modifier
from transformers import PreTrainedModel

from moe_coverage_plugin.core.feasibility import check_budget
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, router_needs, uniform_shape
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.attribution_checks import refuse_pruned
from moe_coverage_plugin.modifiers.channel_pruning import ChannelPruningModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import overridden
from moe_coverage_plugin.modifiers.quantizers import check_quantizers
from moe_coverage_plugin.options.base import Options

M = TypeVar("M", bound=Modifier)


def check_before_text(model: PreTrainedModel, modifiers: Sequence[Modifier], recipe_args: Mapping[str, Any]) -> None:
    """Check a recipe on a model, as far as no calibration data is needed.

    Args:
        model: the model to compress.
        modifiers: those of the recipe, in their order; they are not changed.
        recipe_args: values for fields of the pruning modifiers, by name.

    Raises:
        CoverageError: the layers were pruned before, blocks or budget do not fit them, or a quantizer does not fit the
            blocks.
    """
    made = [overridden(each, recipe_args) if isinstance(each, Options) else each for each in modifiers]
    attribution, coverage = _only(AttributionModifier, made), _only(CoverageModifier, made)
    pruning, alignment = _only(ChannelPruningModifier, made), _only(AlignmentModifier, made)
    if attribution is None or coverage is None or pruning is None:
        return
    linearize_expert_lists(model)
    layers = find_moe_layers(model, attribution.ignore)
    refuse_pruned(model, layers)
    experts, channels = uniform_shape(layers)
    check_budget(coverage, alignment, pruning.layout, [router_needs(each) for each in layers], experts, channels)
    multiple = 1 if alignment is None else alignment.width_multiple
    check_quantizers(model, layers, made[made.index(pruning) + 1 :], multiple, pruning.layout)


def _only(kind: type[M], modifiers: Sequence[Modifier]) -> M | None:
    """The only modifier of a kind; a recipe with several is checked when it initializes."""
    found = [each for each in modifiers if isinstance(each, kind)]
    return found[0] if len(found) == 1 else None
