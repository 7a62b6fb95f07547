"""Checks that no rank would get a part of a quantization group, in the user's process.

vLLM finds the same when it builds the layer, in another process, whose errors reach the user as "see root cause
above", or, in some releases, at the first request. Ragged experts always fit: ranks are assigned entire groups.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.parallelism import SplitLayer

# scales and shapes of the layers that vLLM splits by their input
SPLIT_BY_INPUT = re.compile(r"(\.layers\.\d+\..*\.(?:o_proj|out_proj|down_proj|w2))\.(weight_scale|weight_shape)$")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def check_degrees(
    directory: Path,
    manifest: Manifest,
    group_sizes: Collection[int],
    ranks: int,
    expert_ranks: int,
    any_expert_ranks: bool,
) -> None:
    """Check that the numbers of ranks divide the layers of a local checkpoint into entire quantization groups.

    Args:
        directory: of the checkpoint; one that is not local is not checked.
        manifest: of the checkpoint.
        group_sizes: group sizes of the checkpoint's quantization.
        ranks: number of ranks that share each linear layer.
        expert_ranks: number of ranks that share each expert.
        any_expert_ranks: whether our method serves the experts, which any number of ranks may share.

    Raises:
        CoverageError: a layer does not fit; the message names the first one.
    """
    if manifest.layout != "ragged":
        _check(SplitLayer("experts", manifest.declared_width), expert_ranks)
    for name, channels, group_size in _grouped_layers(directory, group_sizes):
        if EXPERT.search(name) is None:
            _check(SplitLayer(name, channels, group_size), ranks)
        elif manifest.layout != "ragged" and not any_expert_ranks:
            _check(SplitLayer(name, channels, group_size), expert_ranks)


def _check(layer: SplitLayer, ranks: int) -> None:
    if (obstacle := layer.obstacle(ranks)) is not None:
        raise CoverageError(
            f"{ranks} ranks do not fit the checkpoint: {obstacle}; serve with a --tensor-parallel-size that "
            "moe-coverage inspect lists for it, or quantize with smaller groups"
        )


def _grouped_layers(directory: Path, group_sizes: Collection[int]) -> list[tuple[str, int, int]]:
    """Return name, input channels and group size of every layer that is stored in groups."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for file in sorted(directory.glob("*.safetensors")):
        with open_weights(file) as shard:
            for name in shard.keys():  # noqa: SIM118  # an open file is not a mapping
                match = SPLIT_BY_INPUT.search(name)
                # experts of other layouts than ragged have one width, so the first one is enough
                if match is None or ((expert := EXPERT.search(name)) is not None and int(expert[1]) > 0):
                    continue
                # the shape of a weight before packing is a tensor of two numbers
                is_shape = match[2] == "weight_shape"
                value = shard.get_tensor(name)[1] if is_shape else shard.get_slice(name).get_shape()[-1]
                found[name.removesuffix(f".{match[2]}")][match[2]] = int(value)
    # a layer that lacks one of the two is damaged, which the loader reports
    complete = (
        (name, sizes["weight_shape"], sizes["weight_scale"]) for name, sizes in found.items() if len(sizes) == 2
    )
    layers = [(name, channels, channels // groups) for name, channels, groups in complete]
    return [layer for layer in layers if layer[2] in group_sizes]
