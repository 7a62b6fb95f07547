"""Finds the tensors of experts in a checkpoint, whose names differ from those of modules in some families."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.manifest import CoverageError, Manifest

# model.layers.3.mlp.experts.7.gate_proj.weight; the first number is that of the layer
EXPERT_TENSOR = re.compile(r"((?:[^.\d][^.]*\.)*)(\d{1,9})\.((?:[^.]+\.)*?experts)\.(\d{1,9})\.([^.]+)\.([^.]+)")
NUMBERED = re.compile(r"((?:[^.\d][^.]*\.)*)(\d{1,9})\.")
DOWN_NAMES = ("down_proj", "w2")

ExpertTensors = dict[tuple[str, int], dict[str, dict[str, str]]]
"""``(module path of the layer's experts, expert)`` -> projection -> last part of the name (``weight``) -> name."""


def layer_number(path: str) -> int | None:
    """Return the first number in a module path or a tensor name."""
    match = NUMBERED.match(path)
    return int(match[2]) if match is not None else None


def layers_by_number(manifest: Manifest) -> dict[int, str]:
    """Return the module paths of all MoE layers by number.

    Raises:
        CoverageError: a path has no number, or two have the same.
    """
    found: dict[int, str] = {}
    for path in manifest.widths:
        number = layer_number(f"{path}.")
        if number is None or number in found:
            raise CoverageError(
                f"the manifest names a layer {path!r}, which has no number or that of another layer: the entry is "
                "damaged, copy config.json again"
            )
        found[number] = path
    return found


def find_experts(tensors: Tensors, manifest: Manifest) -> ExpertTensors:
    """Group the tensors of the experts that the manifest describes.

    Experts of other parts of the model, such as layers that predict several tokens, are left out. They have another
    path before the number of their layer.

    Raises:
        CoverageError: experts of one layer have different paths.
    """
    layers = layers_by_number(manifest)
    matches = [(name, match) for name in tensors if (match := EXPERT_TENSOR.fullmatch(name)) is not None]
    root = _root((match[1] for _, match in matches if int(match[2]) in layers), manifest)
    found: ExpertTensors = defaultdict(lambda: defaultdict(dict))
    paths: dict[str, str] = {}
    for name, match in matches:
        if match[1] != root:
            continue
        number = int(match[2])
        # an unknown layer keeps its own path, which the manifest does not have
        layer = layers.get(number, f"{root}{number}.{match[3]}")
        if paths.setdefault(layer, match[3]) != match[3]:
            raise CoverageError(
                f"{name} is under another path than other experts of its layer ({paths[layer]}): the files are of two "
                "checkpoints, copy the checkpoint again"
            )
        found[layer, int(match[4])][match[5]][match[6]] = name
    return found


def names_of(experts: ExpertTensors) -> set[str]:
    """Return the names of all tensors of experts."""
    return {name for projections in experts.values() for kinds in projections.values() for name in kinds.values()}


def is_down(projection: str) -> bool:
    """Return whether a projection is the one whose input are the channels of the expert."""
    return projection in DOWN_NAMES


def _root(roots: Iterable[str], manifest: Manifest) -> str:
    """Return the path before the layer number; for nested models names of modules and tensors can differ in it."""
    counts = Counter(roots)
    own: Collection[str] = [match[1] for path in manifest.widths if (match := NUMBERED.match(path)) is not None]
    return next((root for root in own if root in counts), max(counts, key=counts.__getitem__, default=""))
