"""Finds the layers of a checkpoint whose input channels vLLM splits, for ``inspect`` and for the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_coverage_plugin.expert_scheme import quantized_groups
from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.parallelism import SplitLayer

SPLIT_BY_INPUT = re.compile(r"\.(o_proj|out_proj|down_proj|w2)\.(weight|weight_shape)$")
EXPERT = re.compile(r"\.experts\.\d+\.")
EXPERTS = "experts"
WORD_BITS = 32


@dataclass(frozen=True)
class StoredLayer:
    """A layer that is split by input channels.

    Attributes:
        kind: what it is, for people, ``dense MLP``.
        name: its module path.
        channels: input channels before splitting.
        unit: input channels that must stay on one rank.
        unit_name: what has ``unit`` channels, in messages.
    """

    kind: str
    name: str
    channels: int
    unit: int | None = None
    unit_name: str = "group size"

    def as_split(self, what: str) -> SplitLayer:
        """Return the layer for the rules of tensor parallelism, called ``what`` in messages."""
        return SplitLayer(what, self.channels, self.unit, self.unit_name, self.kind == EXPERTS)


def evenly_split_layers(
    tensors: Tensors, quantization: Any, manifest: Manifest, any_expert_ranks: bool
) -> Iterator[StoredLayer]:
    """Yield the layers whose input channels ranks share evenly, each without cutting a unit.

    Experts of unequal width are not among them: our method assigns entire units of them, to any number of ranks.

    Args:
        tensors: headers of all weight files; empty if they are unknown.
        quantization: ``quantization_config`` of the checkpoint; ``None`` if there is none.
        manifest: of the checkpoint.
        any_expert_ranks: whether our method serves experts of one width, too, of which only the width must be divided.

    Raises:
        CoverageError: a packed weight has no scales, or its shape is damaged.
    """
    one_width = manifest.layout != "ragged"
    if one_width and (any_expert_ranks or not tensors):
        yield StoredLayer(EXPERTS, EXPERTS, manifest.declared_width)
    for layer in _split_layers(tensors, quantization):
        if layer.kind != EXPERTS or (one_width and not any_expert_ranks):
            yield layer


def _split_layers(tensors: Tensors, quantization: Any) -> Iterator[StoredLayer]:
    """Yield the layers that are split by input channels, one for each combination of kind, shapes and dtype."""
    weights = [group["weights"] for group in quantized_groups(quantization)]
    seen = set()
    for name, tensor in tensors.items():
        match = SPLIT_BY_INPUT.search(name)
        if match is None:
            continue
        module = name.removesuffix(f".{match[2]}")
        kind = _kind(module, match[1])
        scale = tensors.get(f"{module}.weight_scale")
        packed = tensors.get(f"{module}.weight_packed")
        # most layers are equal, and reading a file takes time; the shape of a packed weight is in its scales
        shapes = [each and each.shape for each in (packed, scale)]
        key = (kind, tensor.shape, tensor.dtype, *shapes)
        if key in seen:
            continue
        seen.add(key)
        if match[2] == "weight":
            block = _block(weights) if scale is not None and min(scale.shape, default=1) > 1 else None
            yield StoredLayer(kind, module, tensor.shape[-1], block, "block of scales of")
            continue
        if scale is None or len(scale.shape) != 2 or tensor.shape != (2,):
            raise CoverageError(f"{module} has no scales or no shape: the checkpoint is damaged, write it again")
        # the shape before packing is stored as a tensor of two numbers
        with open_weights(tensor.file, "np") as shard:
            channels = int(shard.get_tensor(name)[1])
        groups = scale.shape[1]
        sizes = {args.get("group_size") for args in weights}
        if groups > 1 or channels in sizes:
            yield StoredLayer(kind, module, channels, -(-channels // groups))
        else:
            bits = {args["num_bits"] for args in weights if args.get("num_bits")}
            yield StoredLayer(kind, module, channels, WORD_BITS // min(bits, default=4), "packed word of")


def _kind(module: str, projection: str) -> str:
    if EXPERT.search(f"{module}.") is not None:
        return EXPERTS
    if projection in ("o_proj", "out_proj"):
        return "attention output" if projection == "o_proj" else "linear attention output"
    return "shared expert" if "shared" in module else "dense MLP"


def _block(weights: list[Mapping[str, Any]]) -> int | None:
    blocks = [args["block_structure"][-1] for args in weights if args.get("strategy") == "block"]
    return max(blocks, default=None)
