"""Which quantized models a pruned checkpoint can hold: engines and ``load`` must compute what was calibrated."""

from __future__ import annotations

from compressed_tensors import TRANSFORM_CONFIG_NAME
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType
from torch.nn import Module

from moe_coverage_plugin.manifest import CoverageError

REMEDY = "engines serve experts of unequal width in 16 bits or as 4-bit integers by group or channel"


def unserved(scheme: QuantizationScheme) -> str | None:
    """Why engines cannot serve experts of unequal width that are stored so, ``int8 weights``; ``None`` if they can."""
    weights = scheme.weights
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "quantized activations"
    if weights is None:
        return None
    kind, strategy = QuantizationType(weights.type), QuantizationStrategy(weights.strategy)
    if kind != QuantizationType.INT or weights.num_bits != 4:
        return f"{kind.value}{weights.num_bits} weights"
    if strategy not in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL):
        return f"weights by {strategy.value}"
    if weights.group_size is not None and weights.group_size % 8:
        return f"groups of {weights.group_size}, no multiple of 8"
    if scheme.format not in (None, CompressionFormat.pack_quantized.value):
        return f"format {CompressionFormat(scheme.format).value}"
    return None


def check_activations(scheme: QuantizationScheme, subject: str) -> None:
    """Refuse activations of experts that no engine would quantize; ``subject`` begins the sentence.

    Raises:
        CoverageError: the scheme quantizes activations.
    """
    if scheme.input_activations is not None or scheme.output_activations is not None:
        raise CoverageError(
            f"{subject} quantized activations, but {REMEDY}: quantize them with W4A16, or prune with layout='padded' "
            "or 'uniform', which are left to the engine's own kernels"
        )


def check_rotations(model: Module) -> None:
    """Refuse a model that the toolkit rotated, by SpinQuant or QuIP.

    Raises:
        CoverageError: it is one.
    """
    if getattr(model, TRANSFORM_CONFIG_NAME, None) is not None:
        raise CoverageError(
            "the model carries rotations (SpinQuant, QuIP), which leave routers as they are and which engines do not "
            "compute in experts of unequal width: quantize the pruned checkpoint again without them"
        )
