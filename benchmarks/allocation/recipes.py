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
Rounding = Literal["nearest", "gptq"]

QUANTIZERS: dict[Rounding, str] = {"nearest": "QuantizationModifier", "gptq": "LayerwiseGPTQModifier"}

BLOCK = 64
HAMILTON = {"block_size": BLOCK, "min_width": BLOCK, "strategy": "hamilton", "rule": "l-r-c"}
BLOCKS = {"block_size": BLOCK, "strategy": "blocks"}
WIDE_BLOCKS = {**BLOCKS, "block_size": 2 * BLOCK}

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
    reconstruct: Refit | None = None,
) -> Recipe:
    """Recipe of the modifiers of this package.

    Args:
        sparsity: removed fraction of the expert channels.
        coverage: fields of ``CoverageModifier`` besides the sparsity.
        alignment: fields of ``AlignmentModifier``, ``None`` for exact widths.
        metric: ``channel_metric``.
        importance: ``expert_importance``.
        noise: ``layer_noise``, set only if the allocation uses the loss of layers.
        reconstruct: projections of the kept channels to fit, ``None`` for no reconstruction.
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
    modifiers["ChannelPruningModifier"] = {
        "layout": "ragged",
        "reconstruct": reconstruct is not None,
        "pictures": False,
    } | ({"refit": reconstruct} if reconstruct else {})
    return Recipe(modifiers)


def recommended(
    sparsity: float,
    alignment: Fields | None = BLOCKS,
    *,
    metric: str = "obs",
    reconstruct: Refit | None = "all",
) -> Recipe:
    """Recipe that keeps the channels that the loss depends on most, as ``recommended_p50`` does."""
    return channels(sparsity, TOP_CHANNELS, alignment, metric=metric, reconstruct=reconstruct)


def reap(sparsity: float) -> Recipe:
    """Recipe of the toolkit's REAP modifier, which removes ``floor(sparsity * E)`` experts of every layer."""
    return Recipe({"REAPPruningModifier": {"sparsity": sparsity}})


def wanda(sparsity: float) -> Recipe:
    """Recipe of the toolkit's Wanda modifier, which sets single weights of experts to zero."""
    return Recipe({"WandaPruningModifier": {"sparsity": sparsity, "targets": [r"re:.*[.]experts[.]\d+$"]}})


def quantizer(bits: int, rounding: Rounding = "nearest") -> Modifiers:
    """Modifier that rounds weights, symmetric, in groups of one block; none for 16 bits.

    Args:
        bits: bits of a weight.
        rounding: to nearest, or by GPTQ layer by layer in the pass of the reconstruction.
    """
    if bits == 16:
        return {}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"config_groups": groups, "ignore": ["lm_head", "re:.*shared_expert_gate$"]}
    # as in the recommended recipes
    observer = {"weight_observer": "imatrix_mse"} if rounding == "gptq" else {}
    return {QUANTIZERS[rounding]: fields | observer}
