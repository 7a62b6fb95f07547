"""Which layers of a checkpoint vLLM splits among ranks by their input, and what may not be parted there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_coverage_plugin.cli.checkpoint import EXPERT, Checkpoint
from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.parallelism import ParallelShape, SplitLayer

SPLIT_BY_INPUT = re.compile(r"\.(o_proj|down_proj|w2)\.(weight|weight_packed)$")


def parallel_shape(checkpoint: Checkpoint) -> ParallelShape:
    """What decides over how many ranks vLLM can spread a checkpoint.

    Raises:
        CoverageError: the config lacks a number, or a packed weight its scales.
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
        what = _what(name)
        # ragged experts are dealt out in whole groups, which any number of ranks can be
        if what is None or (what == "experts" and ragged):
            continue
        scale = checkpoint.tensors.get(name.replace("weight_packed", "weight_scale"), tensor)
        # layers repeat, and each look into a file takes time
        if (looks := (what, tensor.shape, scale.shape)) not in seen:
            seen.add(looks)
            yield _split_layer(checkpoint, what, name)


def _what(name: str) -> str | None:
    match = SPLIT_BY_INPUT.search(name)
    if match is None:
        return None
    if EXPERT.search(name) is not None:
        return "experts"
    if match[1] == "o_proj":
        return "attention output"
    return "shared expert" if "shared" in name else "dense MLP"


def _split_layer(checkpoint: Checkpoint, what: str, name: str) -> SplitLayer:
    tensor = checkpoint.tensors[name]
    if name.endswith(".weight"):
        return SplitLayer(what, tensor.shape[-1])
    scale = checkpoint.tensors.get(name.replace("weight_packed", "weight_scale"))
    shape_name = name.replace("weight_packed", "weight_shape")
    stored_shape = checkpoint.tensors.get(shape_name)
    if scale is None or len(scale.shape) != 2 or stored_shape is None or stored_shape.shape != (2,):
        raise CoverageError(f"{name} has no scales or no shape beside it: the checkpoint is damaged, write it again")
    # the shape of the weight before packing is itself a tensor, of two numbers
    with open_weights(stored_shape.file, "np") as shard:
        channels = int(shard.get_tensor(shape_name)[1])
    group_size = channels // max(scale.shape[1], 1)
    by_group = any(weights.get("group_size") == group_size for weights in checkpoint.weight_groups)
    return SplitLayer(what, channels, group_size if by_group else None)
