"""The record of a checkpoint's contents in its manifest entry, from which readers find what is missing or changed.

It has all tensors by pattern: ``model.layers.*.mlp.experts.*.up_proj.weight`` -> ``[[dtype, shape, layers]]``. The
first star is the number of a layer; a second one is that of every kept expert, whose shapes (``null``) follow from the
widths.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from moe_coverage_plugin.files.expert_tensors import NUMBERED, find_experts, layer_number, layers_by_number, names_of
from moe_coverage_plugin.files.headers import Tensors, read_headers
from moe_coverage_plugin.files.values import has_negative_scales
from moe_coverage_plugin.manifest import CONFIG_KEY, MOST_LAYERS, CoverageError, Manifest

# fields of a config that decide shapes; not those that users change, such as experts per token
SIZES = re.compile(
    r"hidden_size|vocab_size|num_hidden_layers|num_(attention|key_value)_heads|(\w+_)?(head_dim|lora_rank)"
    r"|(\w+_)?intermediate_(size|dim)|linear_\w+|num_(local_)?experts|(n|moe_num)_routed_experts|moe_num_experts"
    r"|(n|num|moe_num)_shared_experts|first_k_dense_replace|decoder_sparse_step|moe_layer_\w+"
)
NEGATIVE_KEY = "negative_scales"
FLOATS = ("F32", "BF16", "F16")
DAMAGED = f"the record of contents in the {CONFIG_KEY} entry is damaged: copy config.json again"

Kind = tuple[str, tuple[int, ...] | None]
"""Dtype and shape of a tensor; no shape if it follows from the width of an expert."""


def record_contents(directory: Path, manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the tensors in the files of a directory, and its config, for :attr:`Manifest.contents`.

    Args:
        directory: has the weight files.
        manifest: widths of the experts.
        config: content of ``config.json``.
    """
    quantization = config.get("quantization_config") or {}
    tensors = read_headers(directory)
    kinds: dict[str, dict[Kind, list[int]]] = defaultdict(lambda: defaultdict(list))
    in_experts = _uniform_in_experts(tensors, manifest)
    for pattern, found in in_experts.items():
        for layer, (dtype, _) in found.items():
            kinds[pattern][dtype, None].append(layer)
    collapsed = {name for found in in_experts.values() for _, names in found.values() for name in names}
    for name in tensors.keys() - collapsed:
        number = layer_number(name)
        kinds[_pattern(name)][tensors[name].dtype, tensors[name].shape] += [] if number is None else [number]
    return {
        "tensors": {
            pattern: [
                [dtype, None if shape is None else list(shape), _ranges(layers)] for (dtype, shape), layers in of
            ]
            for pattern, of in sorted((pattern, sorted(of.items(), key=str)) for pattern, of in kinds.items())
        },
        "sizes": sizes(config),
        "config_groups": _digest(quantization.get("config_groups")),
        "ignore": _collapse(quantization.get("ignore") or []),
        **({NEGATIVE_KEY: True} if has_negative_scales(tensors) else {}),
    }


def expected_tensors(manifest: Manifest) -> dict[str, Kind]:
    """Return every tensor that the record lists; empty if there is no record.

    Raises:
        CoverageError: the record is damaged.
    """
    layers = layers_by_number(manifest)
    expected: dict[str, Kind] = {}
    try:
        for pattern, kinds in manifest.contents.get("tensors", {}).items():
            for dtype, shape, ranges in kinds:
                kind = (str(dtype), None if shape is None else tuple(map(int, shape)))
                for number in _numbers(ranges):
                    name = pattern if number is None else pattern.replace("*", str(number), 1)
                    if shape is not None:
                        expected[name] = kind
                        continue
                    widths = manifest.widths[layers[number]]  # type: ignore[index]
                    for expert, width in enumerate(widths):
                        if width:
                            expected[name.replace("*", str(expert), 1)] = kind
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CoverageError(f"{DAMAGED} ({short(error)})") from error
    return expected


def check_record(tensors: Tensors, config: Mapping[str, Any], manifest: Manifest) -> None:
    """Compare tensors and config with the record; does nothing without a record.

    Raises:
        CoverageError: a tensor is missing, unexpected, or of another dtype or shape; a size or a quantization in the
            config was changed.
    """
    if not manifest.contents:
        return
    try:
        _check_config(config, manifest.contents)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CoverageError):
            raise
        raise CoverageError(f"{DAMAGED} ({short(error)})") from error
    expected = expected_tensors(manifest)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CoverageError(
            f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}: it was not written or copied "
            "completely, copy it again"
        )
    if left_over := sorted(tensors.keys() - expected.keys()):
        raise CoverageError(
            f"{tensors[left_over[0]].file.name} holds {left_over[0]}, which was not written with the checkpoint: the "
            "files are of two checkpoints, copy the checkpoint again into a new directory"
        )
    for name, (dtype, shape) in expected.items():
        found = tensors[name]
        # users cast checkpoints from one of the large float types to another
        if found.dtype != dtype and not (found.dtype in FLOATS and dtype in FLOATS):
            raise CoverageError(
                f"{name} has dtype {found.dtype}, {dtype} was written: the file is damaged, copy the checkpoint again"
            )
        if shape is not None and found.shape != shape:
            raise CoverageError(
                f"{name} has shape {list(found.shape)}, {list(shape)} was written: weights and config.json are not of "
                "the same checkpoint, copy it again"
            )


def sizes(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the fields of a config, and of configs nested in it, that decide the shapes of tensors."""
    found: dict[str, int] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and key != "quantization_config":
            found |= sizes(value, f"{prefix}{key}.")
        elif type(value) is int and SIZES.fullmatch(key):
            found[prefix + key] = value
    return found


def _check_config(config: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
    written = contents.get("sizes", {})
    quantization = config.get("quantization_config") or {}
    for path, value in written.items():
        found: Any = config
        for key in str(path).split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        # true and 1.0 equal 1
        if type(found) is not type(value) or found != value:
            raise CoverageError(
                f"config.json has {path} {short(found)}, {short(value)} was written: it was changed since, copy "
                "config.json again"
            )
    if contents.get("config_groups") != _digest(quantization.get("config_groups")):
        raise CoverageError(
            "config_groups in config.json were changed after the weights were quantized: copy config.json again, or "
            "quantize the model again"
        )
    ignored = set(map(str, quantization.get("ignore") or []))
    for pattern, ranges in contents.get("ignore", {}).items():
        for number in _numbers(ranges):
            name = pattern if number is None else pattern.replace("*", str(number), 1)
            if name not in ignored:
                raise CoverageError(
                    f"ignore in config.json lacks {name}, which was not quantized: it was changed since, copy "
                    "config.json again"
                )


def _uniform_in_experts(tensors: Tensors, manifest: Manifest) -> dict[str, dict[int, tuple[str, list[str]]]]:
    """Return dtype and names of what all kept experts of a layer have alike, by pattern and layer number."""
    names: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    layers = {path: number for number, path in layers_by_number(manifest).items()}
    experts = find_experts(tensors, manifest)
    for (layer, expert), projections in experts.items():
        if layer not in layers:
            continue
        for name in names_of({(layer, expert): projections}):
            pattern = re.sub(r"experts\.\d+\.", "experts.*.", _pattern(name), count=1)
            names[pattern, layers[layer]][expert] = name
    uniform: dict[str, dict[int, tuple[str, list[str]]]] = defaultdict(dict)
    paths = {number: path for path, number in layers.items()}
    for (pattern, number), by_expert in names.items():
        dtypes = {tensors[name].dtype for name in by_expert.values()}
        kept = {expert for expert, width in enumerate(manifest.widths[paths[number]]) if width}
        if len(dtypes) == 1 and by_expert.keys() == kept:
            uniform[pattern][number] = (dtypes.pop(), list(by_expert.values()))
    return uniform


def _pattern(name: str) -> str:
    match = NUMBERED.match(name)
    return name if match is None else f"{match[1]}*{name[match.end() - 1 :]}"


def _collapse(names: Iterable[str]) -> dict[str, str]:
    """Return for patterns of names the numbers that occur in them."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        # a star in a regular expression is no place of a number
        number = None if "*" in name else layer_number(name)
        numbers[name if number is None else _pattern(name)] += [] if number is None else [number]
    return {pattern: _ranges(found) for pattern, found in sorted(numbers.items())}


def _ranges(numbers: Iterable[int]) -> str:
    """``0-2,5``; empty if there are no numbers."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _numbers(ranges: str) -> Iterator[int | None]:
    if not ranges:
        yield None
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) >= 100 * MOST_LAYERS:
            raise ValueError(f"layer {short(last or first)}")
        yield from range(int(first), int(last or first) + 1)


def _digest(groups: Any) -> str | None:
    # an entry without groups and one with none are alike
    return hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest() if groups else None
