"""Refuses numbers of ranks that would part channels with a common scale, in the user's own process.

vLLM finds the same when it builds the layer, in another process, whose errors reach the user as "see root cause
above", or, in some releases, at the first request. Groups of ragged experts are dealt to ranks whole and always fit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.parallelism import SplitLayer

# of layers that vLLM splits by their input; of experts, which have one width where this is asked, the first tells
SPLIT_BY_INPUT = re.compile(r"(\.layers\.\d+\..*\.(?:o_proj|out_proj|down_proj|w2))\.(weight_scale|weight_shape)$")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def check_degrees(
    directory: Path,
    manifest: Manifest,
    group_sizes: Collection[int],
    ranks: int,
    expert_ranks: int,
    expert_groups_may_part: bool,
) -> None:
    """Refuse ranks that cut groups of a local checkpoint, or experts of one width unevenly.

    Args:
        directory: of the checkpoint; nothing is known of one that is not local.
        group_sizes: those of the checkpoint's quantization.
        ranks: among which linear layers are split.
        expert_ranks: among which experts are split.
        expert_groups_may_part: whether our method serves the experts, to which any number of groups may be given.

    Raises:
        CoverageError: naming the first layer that does not fit.
    """
    if manifest.layout != "ragged":
        _check(SplitLayer("experts", manifest.declared_width), expert_ranks)
    for name, channels, group_size in _grouped_layers(directory, group_sizes):
        if EXPERT.search(name) is None:
            _check(SplitLayer(name, channels, group_size), ranks)
        elif manifest.layout != "ragged" and not expert_groups_may_part:
            _check(SplitLayer(name, channels, group_size), expert_ranks)


def _check(layer: SplitLayer, ranks: int) -> None:
    if (obstacle := layer.obstacle(ranks)) is not None:
        raise CoverageError(
            f"{ranks} ranks do not fit the checkpoint: {obstacle}; serve with a --tensor-parallel-size that "
            "moe-coverage inspect lists for it, or quantize with smaller groups"
        )


def _grouped_layers(directory: Path, group_sizes: Collection[int]) -> list[tuple[str, int, int]]:
    """Name, input channels and group size of every layer that is stored in groups."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for file in sorted(directory.glob("*.safetensors")):
        with open_weights(file) as shard:
            for name in shard.keys():  # noqa: SIM118  # an open file is no mapping
                match = SPLIT_BY_INPUT.search(name)
                if match is None or ((expert := EXPERT.search(name)) is not None and int(expert[1]) > 0):
                    continue
                # the shape of a weight before packing is itself a tensor, of two numbers
                is_shape = match[2] == "weight_shape"
                value = shard.get_tensor(name)[1] if is_shape else shard.get_slice(name).get_shape()[-1]
                found[name.removesuffix(f".{match[2]}")][match[2]] = int(value)
    # what lacks one of the two is damaged, of which the loader tells
    whole = ((name, sizes["weight_shape"], sizes["weight_scale"]) for name, sizes in found.items() if len(sizes) == 2)
    layers = [(name, channels, channels // groups) for name, channels, groups in whole]
    return [layer for layer in layers if layer[2] in group_sizes]
