"""Checks names and fields of modifiers in a recipe, before a toolkit reads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options.base import Options
from moe_coverage_plugin.options.pruning import (
    AlignmentOptions,
    AttributionOptions,
    ChannelPruningOptions,
    CoverageOptions,
)

MODIFIERS: dict[str, type[Options]] = {
    "AttributionModifier": AttributionOptions,
    "CoverageModifier": CoverageOptions,
    "AlignmentModifier": AlignmentOptions,
    "ChannelPruningModifier": ChannelPruningOptions,
}
# what each takes values from, before it in the recipe
NEEDED = {
    "CoverageModifier": "AttributionModifier",
    "AlignmentModifier": "CoverageModifier",
    "ChannelPruningModifier": "CoverageModifier",
}
# fields that the toolkit gives to every modifier
TOOLKIT_FIELDS = frozenset(["index", "group", "start", "end", "update", "requires_calibration_data"])


def check_fields(modifier: str, fields: Any, overrides: Mapping[str, Any]) -> None:
    """Check the fields of a modifier of a recipe, as making it would.

    Args:
        modifier: its name; those of other packages are passed over.
        fields: its fields as the recipe has them; ``None``: none.
        overrides: values for fields of our modifiers, by name.

    Raises:
        CoverageError: names the field, its value, and what it may be.
    """
    if (options := MODIFIERS.get(modifier)) is None:
        return
    if not isinstance(fields, Mapping | None):
        raise CoverageError(f"{modifier} has {fields!r} in the recipe: give its fields as a mapping, or {{}}")
    given = {str(name): value for name, value in (fields or {}).items() if name not in TOOLKIT_FIELDS}
    changed = {name: value for name, value in overrides.items() if name in options.model_fields}
    # the name of the modifier for messages
    type(modifier, (options,), {"__module__": __name__})(**given | changed)


def check_order(modifiers: Sequence[str]) -> None:
    """Check that each pruning modifier has the one before it in the recipe that it takes values from.

    Args:
        modifiers: names of the recipe's modifiers, in their order.

    Raises:
        CoverageError: names both.
    """
    for position, name in enumerate(modifiers):
        needed = NEEDED.get(name)
        if needed is not None and needed not in modifiers[:position]:
            raise order_error(name, needed, needed in modifiers[position:])


def order_error(modifier: str, needed: str, comes_after: bool) -> CoverageError:
    """Return the error of a modifier that lacks another one before it in the recipe."""
    where = "comes after it" if comes_after else "is missing"
    return CoverageError(
        f"{modifier} needs {needed} before it in the recipe, which {where}: the order is AttributionModifier, "
        "CoverageModifier, AlignmentModifier (optional), ChannelPruningModifier, then quantizers"
    )


def check_overrides(overrides: Collection[str], known: Collection[str]) -> None:
    """Check the names of ``recipe_args``.

    Args:
        overrides: the names.
        known: fields of the recipe's pruning modifiers.

    Raises:
        CoverageError: names that would override nothing, and what may be meant.
    """
    if unknown := sorted(set(overrides) - set(known)):
        close = [match for name in unknown for match in get_close_matches(name, known, n=1, cutoff=0.6)]
        remedy = f"did you mean {', '.join(close)}?" if close else f"these have {', '.join(sorted(known))}"
        raise CoverageError(
            f"recipe_args {', '.join(unknown)} override nothing, only fields of the recipe's pruning modifiers can be "
            f"overridden (edit the recipe for those of a quantizer): {remedy}"
        )


def modifiers_of(content: Any, recipe: str) -> list[tuple[str, Any]]:
    """Return names and fields of the modifiers of a recipe, as read from YAML.

    Args:
        content: ``{"..._stage": {"..._modifiers": {"...Modifier": fields}}}``.
        recipe: name of the recipe, for messages.

    Raises:
        CoverageError: llm-compressor would find no modifier, or skip one because of the names above it.
    """
    if not isinstance(content, dict):
        raise CoverageError(f"{recipe} is not a recipe, which has stages of modifiers: start from one of the package")
    found: list[tuple[str, Any]] = []
    for stage, groups in _mappings(content):
        for group, modifiers in _mappings(groups):
            if not any(name.endswith("Modifier") for name, _ in _mappings(modifiers)):
                continue
            right = [stage_name(stage), f"{group.removesuffix('_modifiers')}_modifiers"]
            if [stage, group] != right:
                raise CoverageError(
                    f"recipe {recipe} has modifiers in the stage {stage!r}, group {group!r}, which llm-compressor "
                    f"skips because of these names: call them {right[0]!r} and {right[1]!r}"
                )
            found += _mappings(modifiers)
    if not found:
        stages = ", ".join(map(repr, list(content)[:3])) or "nothing"
        raise CoverageError(
            f"recipe {recipe} names no modifiers where llm-compressor looks for them, in a group ..._modifiers of a "
            f"stage ..._stage: it begins with {stages}, put the modifiers below prune_stage: and prune_modifiers:, or "
            "start from a recipe of the package"
        )
    return found


def stage_name(given: str) -> str:
    """Return the name of a stage as llm-compressor reads it; when it writes two, it numbers them behind the suffix."""
    numbered = re.fullmatch(r"(.*)_stage(_\d+)", given)
    stem = f"{numbered[1]}{numbered[2]}" if numbered is not None else given.removesuffix("_stage")
    return f"{stem}_stage"


def names_modifier_of_ours(content: Any) -> bool:
    """Return whether a modifier of this package is named anywhere in a recipe, as read from YAML."""
    return any(name in MODIFIERS or names_modifier_of_ours(value) for name, value in _mappings(content))


def _mappings(content: Any) -> Iterator[tuple[str, Any]]:
    return ((str(key), value) for key, value in (content.items() if isinstance(content, dict) else ()))
