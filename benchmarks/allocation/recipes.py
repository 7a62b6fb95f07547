"""Recipes as the toolkit reads them: every method of the comparison at one sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_coverage_plugin.options import CoverageOptions

Modifiers = dict[str, dict[str, Any]]
Fields = Mapping[str, Any]
DropScope = Literal["layer", "model"]

BLOCK = 64
HAMILTON = {"block_size": BLOCK, "min_width": BLOCK, "strategy": "hamilton", "rule": "l-r-c"}
BLOCKS = {"block_size": BLOCK, "strategy": "blocks"}

# the paper's allocation: coverage on both levels; what a layer is worth is measured by removing it
PAPER = {
    "scope": "layers",
    "inter_layer": "coverage",
    "intra_layer": "coverage",
    "layer_prior": "loss",
    "expert_prior": "attribution",
}
INSIDE_LAYERS = {"scope": "layers", "inter_layer": "uniform", "intra_layer": "coverage", "expert_prior": "attribution"}
ONE_LEVEL = {"scope": "global", "intra_layer": "coverage", "expert_prior": "attribution"}
UNIFORM = {"scope": "layers", "inter_layer": "uniform", "intra_layer": "uniform"}
TOP_CHANNELS = {"scope": "global", "intra_layer": "topk_channel"}


@dataclass(frozen=True)
class Recipe:
    """How a model is pruned; quantization comes on top.

    Attributes:
        modifiers: name to fields, as in a recipe file. ``AttributionModifier`` says what to measure; the scores are
            then taken from a file.
        drop_least_used: remove whole experts, those of the fewest routed tokens, in every layer or in the whole model.
    """

    modifiers: Modifiers = field(default_factory=dict)
    drop_least_used: DropScope | None = None


def channels(
    sparsity: float,
    coverage: Fields,
    alignment: Fields | None = None,
    *,
    metric: str = "activation",
    importance: str = "first_order",
    noise: float = 1.0,
    reconstruct: bool = False,
) -> Recipe:
    """Our modifiers.

    Args:
        coverage: fields of ``CoverageModifier`` besides the sparsity.
        alignment: fields of ``AlignmentModifier``; ``None``: exact widths.
        noise: ``layer_noise``, set only where layers are weighed by their loss.
    """
    weighs_layers = CoverageOptions(sparsity=sparsity, **coverage).uses_layer_loss
    modifiers: Modifiers = {
        "AttributionModifier": {
            "channel_metric": metric,
            "expert_importance": importance,
            "layer_noise": noise if weighs_layers else None,
        },
        "CoverageModifier": {"sparsity": sparsity, **coverage},
    }
    if alignment is not None:
        modifiers["AlignmentModifier"] = dict(alignment)
    modifiers["ChannelPruningModifier"] = {"layout": "ragged", "reconstruct": reconstruct, "pictures": False}
    return Recipe(modifiers)


def recommended(sparsity: float, alignment: Fields | None = BLOCKS, reconstruct: bool = False) -> Recipe:
    """The best channels of the whole model by one backward pass."""
    return channels(sparsity, TOP_CHANNELS, alignment, metric="fisher", reconstruct=reconstruct)


def reap(sparsity: float) -> Recipe:
    """Whole experts by the toolkit's own modifier; it removes ``floor(sparsity E)`` of every layer."""
    return Recipe({"REAPPruningModifier": {"sparsity": sparsity}})


def wanda(sparsity: float) -> Recipe:
    """Single weights of experts, unstructured, by the toolkit's own modifier."""
    return Recipe({"WandaPruningModifier": {"sparsity": sparsity, "targets": [r"re:.*[.]experts[.]\d+$"]}})


def quantizer(bits: int) -> Modifiers:
    """Round to nearest, symmetric, in groups of one block; 16 leaves the weights as they are."""
    if bits == 16:
        return {}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head", "re:.*shared_expert_gate$"]}}
