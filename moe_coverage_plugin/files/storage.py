"""Checks that every weight of a checkpoint has the tensors that its way of storing needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from moe_coverage_plugin.expert_scheme import quantized_groups
from moe_coverage_plugin.files.headers import StoredTensor, Tensors
from moe_coverage_plugin.files.quantization import group_counts
from moe_coverage_plugin.manifest import CoverageError

LARGE_FLOATS = ("F32", "BF16", "F16")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
INTEGERS = ("I64", "I32")
WORD_BITS = 32
WEIGHT, PACKED, SCALE = "weight", "weight_packed", "weight_scale"
SHAPE, ZERO_POINT = "weight_shape", "weight_zero_point"
PARTS = (WEIGHT, PACKED, SCALE, SHAPE, ZERO_POINT)
COPY = "copy the checkpoint again, or quantize the model again"

Storage = Literal["plain", "packed", "scaled", "other"]
Modules = dict[str, dict[str, StoredTensor]]
"""Module path as in the files -> last part of the name -> tensor."""


def modules_of(tensors: Tensors) -> Modules:
    """Group tensors by what is before the last dot of their names."""
    modules: Modules = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    return modules


def check_storage(modules: Modules, unpacked: Mapping[str, tuple[int, ...]], quantization: Mapping[str, Any]) -> None:
    """Check every weight: ``plain``, ``packed`` integers, or ``scaled`` numbers of one byte.

    Args:
        modules: of :func:`modules_of`.
        unpacked: values of all ``weight_shape`` tensors, by module.
        quantization: a checked ``quantization_config``.

    Raises:
        CoverageError: a part is missing, left over, or of another dtype or shape than the others need.
    """
    groups = [group["weights"] for group in quantized_groups(quantization)]
    ignored = _Ignored(quantization.get("ignore") or [])
    for module, parts in modules.items():
        if not any(part in parts for part in PARTS):
            continue
        match storage := storage_of(module, parts):
            case "plain":
                _expect_only(module, parts, WEIGHT)
            case "packed":
                _check_packed(module, parts, unpacked.get(module, ()), quantization, groups)
            case "scaled":
                _check_scaled(module, parts, groups)
        if storage in ("packed", "scaled") and ignored.matches(module):
            raise CoverageError(
                f"{module} is quantized, but ignore in config.json names it: config.json is not of these "
                f"weights, {COPY}"
            )


def storage_of(module: str, parts: Mapping[str, StoredTensor]) -> Storage:
    """Return how a weight is stored.

    Raises:
        CoverageError: there is no weight for its scale, or the dtype is not one of weights.
    """
    weight, packed = parts.get(WEIGHT), parts.get(PACKED)
    if packed is not None:
        if packed.dtype == "U8":
            return "other"  # 4-bit floats
        _expect_dtype(f"{module}.{PACKED}", packed, ("I32",))
        return "packed"
    if weight is None:
        left = next(part for part in PARTS if part in parts)
        raise CoverageError(f"the checkpoint has {module}.{left} but no weight of that name: it is incomplete, {COPY}")
    if weight.dtype in (*FLOAT8, "I8"):
        return "scaled"
    _expect_dtype(f"{module}.{WEIGHT}", weight, LARGE_FLOATS)
    return "plain"


def words_of(integers: int, bits: int) -> set[int]:
    """Return the numbers of words that hold packed integers, which may continue in the next word (3 bits) or not."""
    return {-(-integers * bits // WORD_BITS), -(-integers // (WORD_BITS // bits))}


def _check_packed(
    module: str,
    parts: dict[str, StoredTensor],
    unpacked: tuple[int, ...],
    quantization: Mapping[str, Any],
    groups: list[Mapping[str, Any]],
) -> None:
    _expect_only(module, parts, PACKED, SCALE, SHAPE, ZERO_POINT)
    _expect_parts(module, parts, SCALE, SHAPE)
    packed, scale = parts[PACKED], parts[SCALE]
    integers = [args for args in groups if args.get("type") == "int"]
    if not integers:
        raise CoverageError(
            f"{module} has packed integers, but quantization_config in config.json describes none: config.json is not "
            f"of these weights, {COPY}"
        )
    _expect_dtype(f"{module}.{SCALE}", scale, LARGE_FLOATS)
    _expect_dtype(f"{module}.{SHAPE}", parts[SHAPE], INTEGERS)
    _expect_shape(f"{module}.{SHAPE}", parts[SHAPE], (2,))
    all_bits = sorted({args["num_bits"] for args in integers})
    rows, columns = unpacked if len(unpacked) == 2 else (-1, -1)
    if packed.shape not in {(rows, words) for bits in all_bits for words in words_of(columns, bits)}:
        bits = " or ".join(map(str, all_bits))
        raise CoverageError(
            f"{module}.{PACKED} has shape {list(packed.shape)}, which is not the shape of {list(unpacked)} integers "
            f"of {bits} bits ({module}.{SHAPE} and config.json): the files are of two checkpoints, {COPY}"
        )
    counts = group_counts(quantization, columns)
    if counts is not None and scale.shape not in (allowed := [(rows, count) for count in sorted(counts)]):
        _fail_shape(f"{module}.{SCALE}", scale, " or ".join(map(str, map(list, allowed))))
    has_zeros, asymmetric = ZERO_POINT in parts, [args.get("symmetric") is False for args in integers]
    if has_zeros and not any(asymmetric):
        raise CoverageError(
            f"{module} has zero points, but quantization_config in config.json describes none: config.json is not of "
            f"these weights, {COPY}"
        )
    if not has_zeros and all(asymmetric):
        _expect_parts(module, parts, ZERO_POINT)
    if has_zeros:
        zeros = parts[ZERO_POINT]
        _expect_dtype(f"{module}.{ZERO_POINT}", zeros, ("I32",))
        shapes = {(words, *scale.shape[1:]) for bits in all_bits for words in words_of(rows, bits)}
        if zeros.shape not in shapes:
            _fail_shape(f"{module}.{ZERO_POINT}", zeros, " or ".join(map(str, map(list, sorted(shapes)))))


def _check_scaled(module: str, parts: dict[str, StoredTensor], groups: list[Mapping[str, Any]]) -> None:
    _expect_only(module, parts, WEIGHT, SCALE, ZERO_POINT)
    _expect_parts(module, parts, SCALE)
    weight, scale = parts[WEIGHT], parts[SCALE]
    kind = "float" if weight.dtype in FLOAT8 else "int"
    described = [args for args in groups if (args.get("type"), args.get("num_bits")) == (kind, 8)]
    if not described:
        raise CoverageError(
            f"{module} has weights in {weight.dtype}, but quantization_config in config.json describes no 8-bit "
            f"{kind} weights: config.json is not of these weights, {COPY}"
        )
    if any(args.get("scale_dtype") is not None for args in described):
        return
    _expect_dtype(f"{module}.{SCALE}", scale, LARGE_FLOATS)
    strategies = {args.get("strategy") for args in described}
    if strategies == {"channel"}:
        _expect_shape(f"{module}.{SCALE}", scale, (weight.shape[0], 1))


def _expect_only(module: str, parts: dict[str, StoredTensor], *allowed: str) -> None:
    if left_over := [part for part in PARTS if part in parts and part not in allowed]:
        raise CoverageError(
            f"the checkpoint has {module}.{left_over[0]}, which does not belong to {module}.{allowed[0]} in "
            f"{parts[allowed[0]].dtype}: the files are of two checkpoints, {COPY}"
        )


def _expect_parts(module: str, parts: dict[str, StoredTensor], *needed: str) -> None:
    if missing := [part for part in needed if part not in parts]:
        raise CoverageError(
            f"the checkpoint lacks {module}.{missing[0]}, without which the weight cannot be read: it was not written "
            f"or copied completely, {COPY}"
        )


def _expect_dtype(name: str, tensor: StoredTensor, allowed: tuple[str, ...]) -> None:
    if tensor.dtype not in allowed:
        raise CoverageError(
            f"{name} has dtype {tensor.dtype}, expected {' or '.join(allowed)}: the file is damaged or was converted, "
            f"{COPY}"
        )


def _expect_shape(name: str, tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        _fail_shape(name, tensor, str(list(expected)))


def _fail_shape(name: str, tensor: StoredTensor, expected: str) -> None:
    raise CoverageError(
        f"{name} has shape {list(tensor.shape)}, expected {expected}: weights and config.json are not of the same "
        f"checkpoint, {COPY}"
    )


class _Ignored:
    """Names and regular expressions of layers that were not quantized."""

    def __init__(self, ignore: list[str]):
        self.names = set(ignore)
        try:
            self.patterns = [re.compile(name.removeprefix("re:")) for name in ignore if name.startswith("re:")]
        except re.error as error:
            raise CoverageError(
                f"ignore in config.json has an invalid regular expression ({error}): it is damaged, {COPY}"
            ) from error

    def matches(self, module: str) -> bool:
        return module in self.names or any(pattern.match(module) for pattern in self.patterns)
