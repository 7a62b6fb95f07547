"""How the experts of a layer are stored, read from the checkpoint's compressed-tensors configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_coverage_plugin.manifest import CoverageError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Entry = Mapping[str, Any] | None
"""What vLLM's configuration knows of one module: its ``weights``, ``input_activations`` and ``format``."""


@dataclass(frozen=True)
class ExpertScheme:
    """Storage of expert weights.

    Attributes:
        bits: 16 for plain weights of any floating dtype, 8 for 8-bit floats, which are multiplied with activations of
            the same type, 4 for packed integers.
        group_size: input channels that share a scale; ``None`` for one scale per output channel and for plain weights.
        zero_points: whether the integers are asymmetric, with a zero point beside every scale.
    """

    bits: int = 16
    group_size: int | None = None
    zero_points: bool = False

    @property
    def shard_unit(self) -> int:
        """Channels that may not be separated when an expert is dealt to ranks: a scale group, or a packed word."""
        return self.group_size or (8 if self.bits == 4 else 1)


def layer_entry(name: str, widths: Sequence[int], entry_of: Callable[[str], Entry]) -> Entry:
    """The configuration entry that all experts of a layer share.

    Args:
        name: module path of the layer's experts, ``model.layers.0.mlp.experts``.
        widths: stored channels of each expert; 0, a removed expert, has no say.
        entry_of: entry of a module path, ``None`` where the module is not quantized.

    Raises:
        CoverageError: if they differ, as when an ignore list hits some of them.
    """
    paths = [f"{name}.{e}.{projection}" for e, width in enumerate(widths) if width for projection in PROJECTIONS]
    first = entry_of(paths[0])
    for path in paths:
        if entry_of(path) != first:
            raise CoverageError(
                f"{path} is stored {_describe(entry_of(path))} but {paths[0]} {_describe(first)}: all experts of a "
                "layer need one scheme, quantize the model again with targets and ignore that hit all or none"
            )
    return first


def expert_scheme(entry: Entry) -> ExpertScheme | str:
    """The scheme of a configuration entry, or the reason why it cannot be served, ``int8 weights``."""
    if entry is None:
        return ExpertScheme()
    weights = entry["weights"]
    kind, strategy = _value(weights.type), _value(weights.strategy)
    order = _value(weights.actorder)
    if kind == "float" and weights.num_bits == 8:
        return ExpertScheme(8) if _is_fp8_dynamic(entry) else "float8 weights, but not as FP8_DYNAMIC has them"
    if kind != "int" or weights.num_bits != 4:
        return f"{kind}{weights.num_bits} weights"
    if entry.get("format") != "pack-quantized":
        return f"format {entry.get('format')!r}"
    if entry.get("input_activations") is not None:
        return "quantized activations"
    if order in ("group", "dynamic"):
        return f"activation order {order!r}, which permutes columns by g_idx"
    if strategy not in ("group", "channel"):
        return f"strategy {strategy!r}"
    if strategy == "group" and weights.group_size % 8:
        return f"group size {weights.group_size}, which is no multiple of 8"
    return ExpertScheme(4, weights.group_size if strategy == "group" else None, not weights.symmetric)


def supported_scheme(name: str, widths: Sequence[int], entry: Entry) -> ExpertScheme:
    """The scheme of a layer's experts.

    Raises:
        CoverageError: if our kernels cannot serve it, or an expert ends within a scale group.
    """
    scheme = expert_scheme(entry)
    if isinstance(scheme, str):
        raise CoverageError(
            f"{name} has {scheme}, experts of unequal width are served in 16 bits, as int4 weights with group or "
            "channel scales (pack-quantized), or in FP8_DYNAMIC: quantize the pruned model again, for example with "
            "W4A16"
        )
    for expert, width in enumerate(widths):
        if scheme.group_size and width % scheme.group_size:
            raise CoverageError(
                f"{name} expert {expert} has width {width}, no multiple of the quantization group size "
                f"{scheme.group_size}: prune with block_size {scheme.group_size} or quantize with smaller groups"
            )
    return scheme


def _is_fp8_dynamic(entry: Mapping[str, Any]) -> bool:
    """Whether weights have a scale for each output channel, and activations one for each token, made as they come."""
    weights, activations = entry["weights"], entry.get("input_activations")
    return (
        entry.get("format") == "float-quantized"
        and (_value(weights.strategy), weights.symmetric, weights.dynamic) == ("channel", True, False)
        and activations is not None
        and (_value(activations.type), activations.num_bits, _value(activations.strategy)) == ("float", 8, "token")
        and (activations.symmetric, activations.dynamic) == (True, True)
    )


def _describe(entry: Entry) -> str:
    scheme = expert_scheme(entry)
    if isinstance(scheme, str):
        return f"with {scheme}"
    if scheme.bits == 16:
        return "in 16 bits"
    if scheme.bits == 8:
        return "in 8-bit floats"
    zeros = " and zero points" if scheme.zero_points else ""
    return f"in 4 bits with group size {scheme.group_size}{zeros}"


def _value(field: Any) -> Any:
    """The plain value of what may be a string enumeration."""
    return getattr(field, "value", field)
