"""The recommended recipe for those who prefer Python to YAML."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.quant_scheme import is_preset_scheme, preset_name_to_scheme
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationModifier

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.channel_pruning import ChannelPruningModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier

# routing stays in full precision: the head, and the gates of shared experts if a model has them
NEVER_QUANTIZED = ["lm_head", "re:.*shared_expert_gate$"]


def recommended_recipe(
    sparsity: float,
    block_size: int = 128,
    reconstruct: bool = True,
    scheme: str | None = "W4A16",
    ignore: Sequence[str] = (),
    gptq: bool = True,
) -> list[Modifier]:
    """Return the modifiers of the recipes ``recommended_*``, for ``oneshot(recipe=...)``.

    Args:
        sparsity: fraction of the expert channels to remove, in [0, 1).
        block_size: channels of a block, of which every width is a multiple.
        reconstruct: fit the kept channels of each expert to the output of the unpruned expert.
        scheme: name of a preset of compressed-tensors, for instance ``FP8_DYNAMIC``; ``None``: no quantization. Groups
            that do not divide the blocks become as small as needed.
        ignore: more layers to leave in full precision, names or ``re:`` patterns; for instance a dense layer whose
            width is not a multiple of the group size.
        gptq: quantize integer weights by GPTQ, in the pass of the reconstruction; otherwise round them to nearest.

    Raises:
        CoverageError: a value out of range, or an unknown scheme. ``oneshot`` checks the rest when it initializes.
    """
    modifiers: list[Modifier] = [
        AttributionModifier(),
        CoverageModifier(sparsity=sparsity),
        AlignmentModifier(block_size=block_size),
        ChannelPruningModifier(reconstruct=reconstruct),
    ]
    if scheme is not None:
        fitting = _fitting_scheme(scheme, block_size)
        integers = fitting.weights is not None and fitting.weights.type == QuantizationType.INT
        fields = {"config_groups": {"group_0": fitting}, "ignore": [*NEVER_QUANTIZED, *ignore]}
        if gptq and integers:
            modifiers.append(LayerwiseGPTQModifier(**fields, weight_observer="imatrix_mse"))
        else:
            modifiers.append(QuantizationModifier(**fields))
    return modifiers


def _fitting_scheme(name: str, block_size: int) -> QuantizationScheme:
    if not is_preset_scheme(name):
        raise CoverageError(
            f"scheme={name!r} is not a preset of compressed-tensors: use for instance W4A16 or FP8_DYNAMIC"
        )
    scheme = preset_name_to_scheme(name, ["Linear"])
    if scheme.weights is not None and scheme.weights.group_size is not None and scheme.weights.group_size > 0:
        scheme.weights.group_size = math.gcd(scheme.weights.group_size, block_size)
    return scheme
