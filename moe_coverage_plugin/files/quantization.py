"""Checks the types in a ``quantization_config``, so that readers need not expect anything else in it."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from moe_coverage_plugin.expert_scheme import quantized_groups
from moe_coverage_plugin.manifest import CoverageError

ARGUMENTS = ("weights", "input_activations", "output_activations")
MOST_BITS = 16
MOST_PER_GROUP = 2**20
ANY_GROUP = -1
"""In configs of some tools, the group size of weights with one scale per row."""


def check_quantization(quantization: Any) -> None:
    """Check that a ``quantization_config`` has values of the types that compressed-tensors writes.

    Raises:
        CoverageError: a value is of another type or out of its range.
    """
    if quantization is None:
        return
    _expect(isinstance(quantization, Mapping), "quantization_config", quantization, "an object")
    ignore, groups = quantization.get("ignore"), quantization.get("config_groups")
    _expect(ignore is None or _is_texts(ignore), "ignore", ignore, "a list of names")
    _expect(groups is None or isinstance(groups, Mapping), "config_groups", groups, "an object")
    for key in ("format", "quant_method", "quantization_status"):
        _expect(isinstance(quantization.get(key), str | None), key, quantization.get(key), "a text")
    _check_arguments(quantization.get("kv_cache_scheme"), "kv_cache_scheme")
    for name, group in (groups or {}).items():
        _expect(isinstance(group, Mapping), f"group {name}", group, "an object")
        _expect(_is_texts(group.get("targets")), f"targets of group {name}", group.get("targets"), "a list of names")
        _expect(isinstance(group.get("format"), str | None), f"format of group {name}", group.get("format"), "a text")
        for part in ARGUMENTS:
            _check_arguments(group.get(part), f"{part} of group {name}")


def _check_arguments(args: Any, place: str) -> None:
    if args is None:
        return
    _expect(isinstance(args, Mapping), place, args, "an object")
    bits, size = args.get("num_bits"), args.get("group_size")
    _expect(type(bits) is int and 0 < bits <= MOST_BITS, f"num_bits in {place}", bits, f"1 to {MOST_BITS}")
    _expect(
        size is None or (type(size) is int and (0 < size <= MOST_PER_GROUP or size == ANY_GROUP)),
        f"group_size in {place}",
        size,
        f"an integer from 1 to {MOST_PER_GROUP}, or null",
    )
    grouped = size is not None and size > 0
    _expect(grouped or args.get("strategy") != "group", f"group_size in {place}", size, "an integer for groups")
    _expect(args.get("type") in ("int", "float"), f"type in {place}", args.get("type"), "'int' or 'float'")
    for key in ("strategy", "actorder", "scale_dtype", "zp_dtype", "observer"):
        _expect(isinstance(args.get(key), str | bool | None), f"{key} in {place}", args.get(key), "a text")
    for key in ("symmetric", "dynamic"):
        value = args.get(key)
        _expect(isinstance(value, bool | None) or value == "local", f"{key} in {place}", value, "true or false")


def group_counts(quantization: Mapping[str, Any], columns: int) -> set[int] | None:
    """Return the numbers of scales that a row of packed integers can have; ``None`` if a strategy is not known.

    Args:
        quantization: a checked ``quantization_config``.
        columns: length of the row before packing.
    """
    counts: set[int] = set()
    for group in quantized_groups(quantization):
        args = group["weights"]
        strategy, size = args.get("strategy"), args.get("group_size")
        if strategy == "group" or (strategy is None and size is not None and size > 0):
            counts.add(-(-columns // size))
        elif strategy in ("channel", "tensor", None):
            counts.add(1)
        else:
            return None
    return counts


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _expect(fits: bool, what: str, value: Any, expected: str) -> None:
    if not fits:
        raise CoverageError(
            f"{what} in the quantization_config of config.json is {short(value)}, expected {expected}: the file is "
            "damaged, copy it again, or quantize the model again"
        )
