"""Checks the fields of this package's modifiers in a recipe, before a toolkit is imported."""

from __future__ import annotations

from collections.abc import Mapping
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
