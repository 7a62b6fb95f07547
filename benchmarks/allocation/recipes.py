"""Recipes of all compared methods, in the toolkit's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_coverage_plugin.options import CoverageOptions
from moe_coverage_plugin.options.pruning import Refit

Modifiers = dict[str, dict[str, Any]]
Fields = Mapping[str, Any]
RemovalScope = Literal["layer", "model"]

BLOCK = 64
HAMILTON = {"block_size": BLOCK, "min_width": BLOCK, "strategy": "hamilton", "rule": "l-r-c"}
BLOCKS = {"block_size": BLOCK, "strategy": "blocks"}

# the paper's allocation: coverage on both levels; the prior of a layer is the rise of the loss without the layer
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
    """How a model is pruned, without quantization.

    Attributes:
        modifiers: fields of each modifier by its name, as in a recipe file. The fields of ``AttributionModifier`` say
            which scores to measure; the scores themselves are then read from a file.
        drop_least_used: remove the experts with the fewest routed tokens, in each layer or in the entire model.
    """

    modifiers: Modifiers = field(default_factory=dict)
    drop_least_used: RemovalScope | None = None


def channels(
    sparsity: float,
    coverage: Fields,
    alignment: Fields | None = None,
    *,
    metric: str = "activation",
    importance: str = "first_order",
    noise: float = 1.0,
    reconstruct: bool | Refit = False,
) -> Recipe:
    """Recipe of the modifiers of this package.

    Args:
        sparsity: removed fraction of the expert channels.
        coverage: fields of ``CoverageModifier`` besides the sparsity.
        alignment: fields of ``AlignmentModifier``, ``None`` for exact widths.
        metric: ``channel_metric``.
        importance: ``expert_importance``.
        noise: ``layer_noise``, set only if the allocation uses the loss of layers.
        reconstruct: whether to fit the down projections of the kept channels, or which projections to fit.
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
    # the rows that are stored were measured when reconstruction fitted down_proj only
    fit = {"refit": "down" if reconstruct is True else reconstruct} if reconstruct else {}
    modifiers["ChannelPruningModifier"] = {
        "layout": "ragged",
        "reconstruct": bool(reconstruct),
        "pictures": False,
    } | fit
    return Recipe(modifiers)


def recommended(sparsity: float, alignment: Fields | None = BLOCKS, reconstruct: bool = False) -> Recipe:
    """Recipe that keeps the best channels of the entire model by scores from one backward pass."""
    return channels(sparsity, TOP_CHANNELS, alignment, metric="fisher", reconstruct=reconstruct)


def reap(sparsity: float) -> Recipe:
    """Recipe of the toolkit's REAP modifier, which removes ``floor(sparsity * E)`` experts of every layer."""
    return Recipe({"REAPPruningModifier": {"sparsity": sparsity}})


def wanda(sparsity: float) -> Recipe:
    """Recipe of the toolkit's Wanda modifier, which sets single weights of experts to zero."""
    return Recipe({"WandaPruningModifier": {"sparsity": sparsity, "targets": [r"re:.*[.]experts[.]\d+$"]}})


def quantizer(bits: int, gptq: bool = False) -> Modifiers:
    """Modifier that rounds weights to nearest or by GPTQ, symmetric, in groups of one block; none for 16 bits."""
    if bits == 16:
        return {}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    name = "GPTQModifier" if gptq else "QuantizationModifier"
    return {name: {"config_groups": groups, "ignore": ["lm_head", "re:.*shared_expert_gate$"]}}
