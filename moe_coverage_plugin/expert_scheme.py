"""How the experts of a layer are stored, and which ways of storing them can be served.

Both halves decide by these functions: the compressing half before it calibrates and before it saves, the serving half
when it opens a checkpoint. The toolkits bring different releases of compressed-tensors, so a scheme is read as a plain
mapping (:data:`SchemeEntry`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_coverage_plugin.manifest import CoverageError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# projections that engines load into one parameter, and that so need one scheme
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# fields of a model's config that hold the width of an expert, in the order in which engines look for it
WIDTH_KEYS = ("moe_intermediate_size", "intermediate_dim", "intermediate_size")
# 4-bit integers are packed by eight into int32 words
INT4_PER_WORD = 8
SERVED = "engines serve experts of unequal width in 16 bits, as 4-bit integers by group or channel, or in FP8_DYNAMIC"

SchemeEntry = Mapping[str, Any] | None
"""The quantization of one linear layer; ``None`` if it is not quantized.

Keys are those of a ``QuantizationScheme`` of compressed-tensors: ``weights``, ``input_activations`` and
``output_activations`` hold ``QuantizationArgs`` or ``None``, ``format`` is the format on disk, or ``None`` while it is
not decided. ``dict(scheme)`` makes an entry of a ``QuantizationScheme``.
"""


@dataclass(frozen=True)
class ExpertScheme:
    """Storage of expert weights.

    Attributes:
        bits: 16 for weights of any floating dtype that are not quantized, 8 for 8-bit floats, which are multiplied
            with activations of the same type, 4 for packed integers.
        group_size: input channels that share a scale; ``None`` for one scale per output channel and for weights that
            are not quantized.
        zero_points: whether the integers are asymmetric, with a zero point beside every scale.
    """

    bits: int = 16
    group_size: int | None = None
    zero_points: bool = False

    @property
    def shard_unit(self) -> int:
        """Channels that must stay on one tensor-parallel rank: a scale group, or the integers of a packed word."""
        return self.group_size or (INT4_PER_WORD if self.bits == 4 else 1)


def expert_scheme(entry: SchemeEntry) -> ExpertScheme | str:
    """The scheme of an entry, or the reason why experts of unequal width cannot be served in it.

    A reason is a noun phrase that completes "experts have ...", for instance ``int8 weights by channel``.
    """
    if entry is None or (weights := entry["weights"]) is None:
        return ExpertScheme() if not _quantizes_activations(entry) else _description(entry)
    kind, strategy = _value(weights.type), _value(weights.strategy)
    if _quantizes_activations(entry):
        return ExpertScheme(8) if _is_fp8_dynamic(entry) else _description(entry)
    if kind != "int" or weights.num_bits != 4:
        return f"{kind}{weights.num_bits} weights"
    if strategy not in ("group", "channel"):
        return f"weights by {strategy}"
    if _value(weights.actorder) in ("group", "dynamic"):
        return f"activation order {_value(weights.actorder)!r}, which permutes columns by g_idx"
    if strategy == "group" and weights.group_size % INT4_PER_WORD:
        return f"groups of {weights.group_size}, which is not a multiple of {INT4_PER_WORD}"
    if not _has_format(entry, "pack-quantized"):
        return f"format {_value(entry['format'])!r}"
    return ExpertScheme(4, weights.group_size if strategy == "group" else None, not weights.symmetric)


def check_activations(entry: SchemeEntry, subject: str) -> None:
    """Check that engines can quantize the activations of experts as a scheme describes.

    Args:
        entry: scheme of the experts.
        subject: beginning of the message, ``QuantizationModifier would give experts``.

    Raises:
        CoverageError: the scheme quantizes activations and is not ``FP8_DYNAMIC``.
    """
    if _quantizes_activations(entry) and isinstance(reason := expert_scheme(entry), str):
        raise CoverageError(
            f"{subject} quantized activations ({reason}), but {SERVED}: quantize them with FP8_DYNAMIC or W4A16, or "
            "prune with layout='padded' or 'uniform', which engines serve with their own kernels"
        )


def layer_entry(name: str, widths_E: Sequence[int], entry_of: Callable[[str], SchemeEntry]) -> SchemeEntry:
    """The entry that all experts of a layer share.

    Args:
        name: module path of the layer's experts, ``model.layers.0.mlp.experts``.
        widths_E: stored channels of each expert; removed experts (0) are not compared.
        entry_of: entry of a module path.

    Raises:
        CoverageError: the entries differ, for instance because an ignore list names some of the experts.
    """
    paths = [f"{name}.{e}.{projection}" for e, width in enumerate(widths_E) if width for projection in PROJECTIONS]
    first = entry_of(paths[0])
    for path in paths:
        if entry_of(path) != first:
            raise CoverageError(
                f"{path} is stored {_storage(entry_of(path))} but {paths[0]} {_storage(first)}: all experts of a "
                "layer need one scheme, quantize the model again with targets and ignore that match all or none"
            )
    return first


def served_scheme(name: str, widths_E: Sequence[int], entry: SchemeEntry) -> ExpertScheme:
    """The scheme of a layer's experts, checked.

    Args:
        name: module path of the layer's experts.
        widths_E: stored channels of each expert.
        entry: what :func:`layer_entry` returned.

    Raises:
        CoverageError: experts of unequal width cannot be served in it, or an expert ends within a scale group.
    """
    scheme = expert_scheme(entry)
    if isinstance(scheme, str):
        raise CoverageError(
            f"{name} has {scheme}, but {SERVED}: quantize the pruned model again, for example with W4A16"
        )
    for expert, width in enumerate(widths_E):
        if scheme.group_size and width % scheme.group_size:
            raise CoverageError(
                f"{name} expert {expert} has width {width}, which is not a multiple of the quantization group size "
                f"{scheme.group_size}: prune with block_size {scheme.group_size} or quantize with smaller groups"
            )
    return scheme


def quantized_groups(quantization_config: Any) -> list[Mapping[str, Any]]:
    """Return the groups of a ``quantization_config`` that quantize weights; damaged parts are left out.

    A group has ``weights`` and, if activations are quantized, ``input_activations``.
    """
    groups = quantization_config.get("config_groups") if isinstance(quantization_config, Mapping) else None
    found = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in found if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)]


def describe_numbers(args: Mapping[str, Any]) -> str:
    """Describe the quantized weights or activations of a group for people: ``int4, symmetric, groups of 128``."""
    strategy = args.get("strategy")
    scales = f"groups of {args.get('group_size')}" if strategy == "group" else f"one scale per {strategy}"
    symmetry = "symmetric" if args.get("symmetric") else "asymmetric"
    return f"{args.get('type')}{args.get('num_bits')}, {symmetry}, {scales}"


def _quantizes_activations(entry: SchemeEntry) -> bool:
    activations = ("input_activations", "output_activations")
    return entry is not None and any(entry.get(key) is not None for key in activations)


def _is_fp8_dynamic(entry: Mapping[str, Any]) -> bool:
    """Whether the entry equals the preset FP8_DYNAMIC: a weight scale per output channel, an input scale per token."""
    weights, inputs = entry["weights"], entry.get("input_activations")
    return (
        inputs is not None
        and entry.get("output_activations") is None
        and all(_is_symmetric_float8(args) for args in (weights, inputs))
        and (_value(weights.strategy), weights.dynamic) == ("channel", False)
        and (_value(inputs.strategy), inputs.dynamic) == ("token", True)
        and _has_format(entry, "float-quantized")
    )


def _is_symmetric_float8(args: Any) -> bool:
    return (_value(args.type), args.num_bits, args.symmetric) == ("float", 8, True) and _scale_dtype(args) is None


def _has_format(entry: Mapping[str, Any], wanted: str) -> bool:
    return _value(entry.get("format")) in (None, wanted)


def _scale_dtype(args: Any) -> Any:
    # releases of compressed-tensors before 0.13 do not have the field
    return getattr(args, "scale_dtype", None)


def _description(entry: Mapping[str, Any] | None) -> str:
    """``int8 weights by channel, dynamic int8 inputs by token``."""
    assert entry is not None
    parts = {"weights": "weights", "inputs": "input_activations", "outputs": "output_activations"}
    described = [_tensor(name, args) for name, key in parts.items() if (args := entry.get(key)) is not None]
    return ", ".join(described) + (f", format {_value(entry['format'])}" if entry.get("format") is not None else "")


def _tensor(name: str, args: Any) -> str:
    when = "" if name == "weights" else "dynamic " if args.dynamic else "static "
    symmetry = "" if args.symmetric else "asymmetric "
    dtype = _scale_dtype(args)
    scales = "" if dtype is None else f" with {str(dtype).removeprefix('torch.')} scales"
    return f"{when}{symmetry}{_value(args.type)}{args.num_bits} {name} by {_value(args.strategy)}{scales}"


def _storage(entry: SchemeEntry) -> str:
    scheme = expert_scheme(entry)
    if isinstance(scheme, str):
        return f"with {scheme}"
    if scheme.bits == 16:
        return "in 16 bits"
    if scheme.bits == 8:
        return "in 8-bit floats"
    zero_points = " and zero points" if scheme.zero_points else ""
    return f"in 4 bits with group size {scheme.group_size}{zero_points}"


def _value(field: Any) -> Any:
    """The plain value of a field that may be a string enumeration."""
    return getattr(field, "value", field)
