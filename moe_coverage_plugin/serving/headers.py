"""Compares a checkpoint's file headers with its widths, in the user's process and before any weight is read."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.files.weights import open_weights, weight_files
from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, Manifest
from moe_coverage_plugin.serving.packing import packed_columns

EXPERT_TENSOR = re.compile(r"\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.(weight|weight_packed)$")
# what engines name their own parameters
OF_ENGINES = ".routed_experts."
DOWN_NAMES = ("down_proj", "w2")
# what engines look for weights in, pickles among them, where nobody says otherwise
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", INDEX_NAME)

# (layer number, expert) -> checkpoint name and shape of each of its weights
Found = dict[tuple[int, int], list[tuple[str, list[int]]]]


def has_weights(directory: Path) -> bool:
    """Whether a path is a local directory with anything in it that an engine might load."""
    return any(any(directory.glob(pattern)) for pattern in WEIGHTS)


def check_headers(directory: Path, manifest: Manifest) -> None:
    """Refuse a local checkpoint whose expert weights are not those that its widths describe.

    The loader finds the same, but in another process, whose errors reach the user as "see root cause above".

    Raises:
        CoverageError: naming the first file that is missing, cut off or elsewhere, or tensor that is missing, left
            over or of another width.
    """
    found = _expert_weights(directory)
    for path, widths in manifest.widths.items():
        layer = re.search(r"\.layers\.(\d+)\.", path)
        if layer is None:
            continue  # the loader has the last word on models that number their layers otherwise
        for expert, width in enumerate(widths):
            _check_expert(path, expert, width, found.get((int(layer[1]), expert), []))


def _expert_weights(directory: Path) -> Found:
    found: Found = defaultdict(list)
    for file in weight_files(directory):
        with open_weights(file) as shard:
            for name in shard.keys():  # noqa: SIM118  # an open file is no mapping
                if OF_ENGINES in name:
                    raise CoverageError(
                        f"{file} holds {name}, which an engine has rearranged for its ranks (sharded_state): serve "
                        "the checkpoint that it had opened"
                    )
                if (match := EXPERT_TENSOR.search(name)) is not None:
                    found[int(match[1]), int(match[2])].append((name, shard.get_slice(name).get_shape()))
    return found


def _check_expert(path: str, expert: int, width: int, weights: list[tuple[str, list[int]]]) -> None:
    expected = len(PROJECTIONS) if width else 0
    if len(weights) != expected:
        raise CoverageError(
            f"{path} expert {expert} has width {width} and so {expected} weights, the checkpoint holds "
            f"{len(weights)}: copy the checkpoint again, or write it again"
        )
    for name, shape in weights:
        *_, projection, tensor = name.split(".")
        rows, columns = shape if len(shape) == 2 else (-1, -1)
        stored = packed_columns(width) if tensor == "weight_packed" else width
        is_down = projection in DOWN_NAMES
        if (columns if is_down else rows) != (stored if is_down else width):
            raise CoverageError(
                f"{name} has shape {shape}, which is not that of width {width}: tensors and widths are "
                "not of one checkpoint, write it again"
            )
