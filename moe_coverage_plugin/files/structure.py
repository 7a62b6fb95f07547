"""Checks the tensors outside the experts against the config, also without a record of contents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from moe_coverage_plugin.expert_scheme import FUSED, WIDTH_KEYS
from moe_coverage_plugin.files.expert_tensors import (
    EXPERT_TENSOR,
    layer_number,
    layers_by_number,
)
from moe_coverage_plugin.files.expert_widths import AGAIN
from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.files.storage import WEIGHT, Modules, storage_of
from moe_coverage_plugin.manifest import CoverageError, Manifest

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
MOST = 2**31
ROUTERS = (".gate.weight", ".router.weight", ".router.layer.weight")
# of models that read and write tokens; rows are tokens
VOCABULARY = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)")
NORM = re.compile(
    r"(?:.*\.)?(?:layers\.\d+\.(?:input|post_attention)_layernorm|(?:model|language_model)\.norm)\.weight"
)
# attention with compressed keys and values has no projection of keys
COMPRESSED = ("kv_a_proj_with_mqa", "kv_b_proj")


def check_sizes(text_config: Mapping[str, Any], manifest: Manifest) -> None:
    """Check the sizes in the config of a language model that the other checks compare tensors with.

    Raises:
        CoverageError: a size is not a positive integer, the width of experts is not that of the manifest, or the
            manifest names more layers than the model has.
    """
    for key in (*SIZES, *WIDTH_KEYS):
        value = text_config.get(key)
        if value is not None and (type(value) is not int or not 0 < value < MOST):
            raise CoverageError(
                f"config.json has {key} {short(value)}, expected a positive integer: it is damaged, copy it again"
            )
    layers, last = text_config.get("num_hidden_layers"), max(layers_by_number(manifest))
    if layers is not None and last >= layers:
        raise CoverageError(
            f"the manifest names layer {last}, but config.json has num_hidden_layers {layers}: config and manifest "
            "are not of the same model, copy config.json again"
        )
    width_key = next((key for key in WIDTH_KEYS if key in text_config), None)
    if width_key is not None and text_config[width_key] != manifest.declared_width:
        raise CoverageError(
            f"config.json has {width_key} {text_config[width_key]}, {manifest.declared_width} was written for its "
            "widths: it was changed since, copy config.json again"
        )


def check_others(
    tensors: Tensors, in_experts: set[str], modules: Modules, text_config: Mapping[str, Any], manifest: Manifest
) -> None:
    """Check embeddings, norms and routers against the config, and layers for completeness.

    Args:
        tensors: of the checkpoint.
        in_experts: names of those that are of the manifest's experts.
        modules: of :func:`~.storage.modules_of`.
        text_config: config of the language model.
        manifest: of the checkpoint.

    Raises:
        CoverageError: a shape is not that of the config, or a part of a layer is missing.
    """
    vocabulary, hidden = text_config.get("vocab_size"), text_config.get("hidden_size")
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == WEIGHT and len(tensor.shape) == 2 and VOCABULARY.fullmatch(module):
            _compare(name, tensor.shape, (vocabulary, hidden))
        elif NORM.fullmatch(name):
            _compare(name, tensor.shape, (hidden,))
    _check_routers(tensors, manifest)
    if manifest.contents:
        return  # the record has all names
    if others := sorted(name for name in tensors if EXPERT_TENSOR.fullmatch(name) and name not in in_experts):
        raise CoverageError(
            f"the checkpoint holds {others[0]}, an expert of no layer that the manifest names: tensors and widths "
            f"belong to different checkpoints, {AGAIN}"
        )
    numbers = {number for name in tensors if (number := layer_number(name)) is not None}
    count = text_config.get("num_hidden_layers")
    if count is not None and (missing := sorted(set(range(count)) - numbers)):
        raise CoverageError(
            f"config.json has num_hidden_layers {count}, but the checkpoint holds no tensor of layer {missing[0]}: it "
            f"was not written or copied completely, {AGAIN}"
        )
    _check_fused(modules)


def _check_routers(tensors: Tensors, manifest: Manifest) -> None:
    by_layer: dict[int | None, list[str]] = defaultdict(list)
    for name in tensors:
        if name.endswith(ROUTERS) and "experts" not in name:
            by_layer[layer_number(name)].append(name)
    numbers = layers_by_number(manifest)
    for number, layer in numbers.items():
        names = by_layer.get(number, [])
        if not names and any(by_layer.get(other) for other in numbers):
            raise CoverageError(
                f"the checkpoint lacks the router of {layer}, which other layers have: it was not written or copied "
                f"completely, {AGAIN}"
            )
        for name in names:
            if tensors[name].shape[0] != len(manifest.widths[layer]):
                raise CoverageError(
                    f"{name} has shape {list(tensors[name].shape)}, but {layer} has {len(manifest.widths[layer])} "
                    "experts in the manifest: config and weights are not of the same model, copy the checkpoint again"
                )


def _check_fused(modules: Modules) -> None:
    parents: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        parent, _, name = module.rpartition(".")
        parents[parent].add(name)
    gated = {re.sub(r"\d+", "*", parent) for parent, names in parents.items() if "gate_proj" in names}
    for parent, names in parents.items():
        for parts in FUSED:
            present = [name for name in parts if name in names]
            # one alone can be all there is: a query beside compressed keys, an MLP without a gate
            without_gate = present == ["up_proj"] and re.sub(r"\d+", "*", parent) not in gated
            if not present or names & set(COMPRESSED) or without_gate:
                continue
            if len(present) != len(parts):
                missing = next(name for name in parts if name not in names)
                raise CoverageError(
                    f"the checkpoint lacks {parent}.{missing}, which engines load together with {present[0]}: it was "
                    f"not written or copied completely, {AGAIN}"
                )
            ways = {name: storage_of(f"{parent}.{name}", modules[f"{parent}.{name}"]) for name in parts}
            if len(set(ways.values())) > 1:
                first, other = next((first, other) for first in parts for other in parts if ways[first] != ways[other])
                raise CoverageError(
                    f"{parent}.{first} is stored {ways[first]} and {other} {ways[other]}, but engines load both into "
                    f"one parameter: {AGAIN}"
                )


def _compare(name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    sizes = tuple(size if size is not None else found for size, found in zip(expected, shape, strict=False))
    if shape != sizes:
        raise CoverageError(
            f"{name} has shape {list(shape)}, config.json and widths say {list(sizes)}: weights and config.json are "
            "not of the same checkpoint, copy it again"
        )
