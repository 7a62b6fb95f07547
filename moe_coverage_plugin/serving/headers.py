"""Compares a checkpoint's file headers with its widths, in the user's process, before any weight is read."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.files.weights import open_weights, weight_files
from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, Manifest
from moe_coverage_plugin.serving.packing import packed_columns

EXPERT_TENSOR = re.compile(r"\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.(weight|weight_packed)$")
# in the names of an engine's own parameters
OF_ENGINES = ".routed_experts."
DOWN_NAMES = ("down_proj", "w2")
# files that engines load weights from by default; pickles are among them
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", INDEX_NAME)

# (layer number, expert) -> checkpoint name and shape of each of its weights
Found = dict[tuple[int, int], list[tuple[str, list[int]]]]


def has_weights(directory: Path) -> bool:
    """Return whether a path is a local directory with a file that an engine may load."""
    return any(any(directory.glob(pattern)) for pattern in WEIGHTS)


def check_headers(directory: Path, manifest: Manifest) -> None:
    """Check that the expert weights of a local checkpoint have the widths of its manifest.

    The loader finds the same, but in another process, whose errors reach the user as "see root cause above".

    Raises:
        CoverageError: a file is missing, cut off or outside of the directory, or a tensor is missing, unexpected or
            of another width; the message names the first one.
    """
    found = _expert_weights(directory)
    for path, widths in manifest.widths.items():
        layer = re.search(r"\.layers\.(\d+)\.", path)
        if layer is None:
            continue  # models that number their layers otherwise are checked by the loader only
        for expert, width in enumerate(widths):
            _check_expert(path, expert, width, found.get((int(layer[1]), expert), []))


def _expert_weights(directory: Path) -> Found:
    found: Found = defaultdict(list)
    for file in weight_files(directory):
        with open_weights(file) as shard:
            for name in shard.keys():  # noqa: SIM118  # an open file is not a mapping
                if OF_ENGINES in name:
                    raise CoverageError(
                        f"{file} holds {name}, which an engine has rearranged for its ranks (sharded_state): serve "
                        "the checkpoint that the engine loaded"
                    )
                if (match := EXPERT_TENSOR.search(name)) is not None:
                    found[int(match[1]), int(match[2])].append((name, shard.get_slice(name).get_shape()))
    return found


def _check_expert(path: str, expert: int, width: int, weights: list[tuple[str, list[int]]]) -> None:
    expected = len(PROJECTIONS) if width else 0
    if len(weights) != expected:
        raise CoverageError(
            f"{path} expert {expert} has width {width} and so {expected} weights, the checkpoint holds "
            f"{len(weights)}: copy the checkpoint again, or save the model again"
        )
    for name, shape in weights:
        *_, projection, tensor = name.split(".")
        rows, columns = shape if len(shape) == 2 else (-1, -1)
        stored = packed_columns(width) if tensor == "weight_packed" else width
        is_down = projection in DOWN_NAMES
        if (columns if is_down else rows) != (stored if is_down else width):
            raise CoverageError(
                f"{name} has shape {shape}, which is not the shape of width {width}: tensors and widths belong to "
                "different checkpoints, save the model again"
            )
