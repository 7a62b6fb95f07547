"""Which quantized models a pruned checkpoint can hold: engines and ``load`` must compute what was calibrated."""

from __future__ import annotations

from compressed_tensors import TRANSFORM_CONFIG_NAME
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from torch.nn import Module

from moe_coverage_plugin.manifest import CoverageError

REMEDY = "engines serve experts of unequal width in 16 bits, as 4-bit integers by group or channel, or in FP8_DYNAMIC"


def unserved(scheme: QuantizationScheme) -> str | None:
    """Why engines cannot serve experts of unequal width that are stored so, ``int8 weights``; ``None`` if they can."""
    weights = scheme.weights
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return None if _is_fp8_dynamic(scheme) else _words(scheme)
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
        CoverageError: the scheme quantizes activations, and is not that of ``FP8_DYNAMIC``.
    """
    quantizes = scheme.input_activations is not None or scheme.output_activations is not None
    if quantizes and (reason := unserved(scheme)) is not None:
        raise CoverageError(
            f"{subject} quantized activations ({reason}), but {REMEDY}: quantize them with FP8_DYNAMIC or W4A16, or "
            "prune with layout='padded' or 'uniform', which are left to the engine's own kernels"
        )


def _is_fp8_dynamic(scheme: QuantizationScheme) -> bool:
    """Whether it is what the toolkit's preset of that name is: a scale per output channel, and one per token."""
    weights, inputs = scheme.weights, scheme.input_activations
    return (
        weights is not None
        and inputs is not None
        and scheme.output_activations is None
        and all(_is_symmetric_float8(args) for args in (weights, inputs))
        and weights.strategy == QuantizationStrategy.CHANNEL
        and (inputs.strategy, inputs.dynamic) == (QuantizationStrategy.TOKEN, True)
        and scheme.format in (None, CompressionFormat.float_quantized.value)
    )


def _is_symmetric_float8(args: QuantizationArgs) -> bool:
    return (args.type, args.num_bits, args.symmetric) == (QuantizationType.FLOAT, 8, True) and args.scale_dtype is None


def _words(scheme: QuantizationScheme) -> str:
    """``int8 weights by channel, dynamic int8 inputs by token``."""
    parts = {"weights": scheme.weights, "inputs": scheme.input_activations, "outputs": scheme.output_activations}
    told = [_words_of(name, args) for name, args in parts.items() if args is not None]
    of_format = f", format {CompressionFormat(scheme.format).value}" if scheme.format is not None else ""
    return ", ".join(told) + of_format


def _words_of(name: str, args: QuantizationArgs) -> str:
    how = "" if name == "weights" else "dynamic " if args.dynamic else "static "
    symmetry = "" if args.symmetric else "asymmetric "
    kind, strategy = QuantizationType(args.type), QuantizationStrategy(args.strategy)
    scales = "" if args.scale_dtype is None else f" with {str(args.scale_dtype).removeprefix('torch.')} scales"
    return f"{how}{symmetry}{kind.value}{args.num_bits} {name} by {strategy.value}{scales}"


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
