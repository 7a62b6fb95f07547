"""Finds the layers of a checkpoint whose input channels vLLM splits among tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_coverage_plugin.cli.checkpoint import EXPERT, Checkpoint
from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.parallelism import ParallelShape, SplitLayer

SPLIT_BY_INPUT = re.compile(r"\.(o_proj|down_proj|w2)\.(weight|weight_packed)$")


def parallel_shape(checkpoint: Checkpoint) -> ParallelShape:
    """Return the sizes that decide on the tensor-parallel degrees of a checkpoint.

    Raises:
        CoverageError: a number is absent in the config, or a packed weight has no scales.
    """
    latent = checkpoint.config.get("kv_lora_rank") is not None
    has_own = checkpoint.config.get("num_key_value_heads") is not None
    return ParallelShape(
        attention_heads=checkpoint.size("num_attention_heads"),
        key_value_heads=None if latent else checkpoint.size(f"num_{'key_value' if has_own else 'attention'}_heads"),
        experts=max(len(widths) for widths in checkpoint.manifest.widths.values()),
        vocabulary=checkpoint.size("vocab_size"),
        layers=tuple(sorted(set(_split_layers(checkpoint)), key=lambda layer: (layer.what, layer.channels))),
    )


def _split_layers(checkpoint: Checkpoint) -> Iterator[SplitLayer]:
    ragged = checkpoint.manifest.layout == "ragged"
    seen = set()
    for name, tensor in checkpoint.tensors.items():
        kind = _kind(name)
        # ragged experts are split in units of groups, on any number of ranks
        if kind is None or (kind == "experts" and ragged):
            continue
        scale = checkpoint.tensors.get(name.replace("weight_packed", "weight_scale"), tensor)
        # most layers are equal, and reading a file takes time
        if (key := (kind, tensor.shape, scale.shape)) not in seen:
            seen.add(key)
            yield _split_layer(checkpoint, kind, name)


def _kind(name: str) -> str | None:
    match = SPLIT_BY_INPUT.search(name)
    if match is None:
        return None
    if EXPERT.search(name) is not None:
        return "experts"
    if match[1] == "o_proj":
        return "attention output"
    return "shared expert" if "shared" in name else "dense MLP"


def _split_layer(checkpoint: Checkpoint, kind: str, name: str) -> SplitLayer:
    tensor = checkpoint.tensors[name]
    if name.endswith(".weight"):
        return SplitLayer(kind, tensor.shape[-1])
    scale = checkpoint.tensors.get(name.replace("weight_packed", "weight_scale"))
    shape_name = name.replace("weight_packed", "weight_shape")
    stored_shape = checkpoint.tensors.get(shape_name)
    if scale is None or len(scale.shape) != 2 or stored_shape is None or stored_shape.shape != (2,):
        raise CoverageError(f"{name} has no scales or no shape: the checkpoint is damaged, write it again")
    # the shape before packing is stored as a tensor of two numbers
    with open_weights(stored_shape.file, "np") as shard:
        channels = int(shard.get_tensor(shape_name)[1])
    group_size = channels // max(scale.shape[1], 1)
    by_group = any(weights.get("group_size") == group_size for weights in checkpoint.weight_groups)
    return SplitLayer(kind, channels, group_size if by_group else None)
