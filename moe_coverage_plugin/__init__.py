"""Structural compression of mixture-of-experts models: a plugin for llm-compressor, and one for vLLM.

Importing the package registers the modifiers where llm-compressor is installed. In a serving environment, which has
none, it costs nothing: vLLM finds :func:`moe_coverage_plugin.serving.register` through its entry point.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.recipe_files import recipe_path

if TYPE_CHECKING:
    from moe_coverage_plugin.modifiers import (
        AlignmentModifier,
        AttributionModifier,
        ChannelPruningModifier,
        CoverageModifier,
    )
    from moe_coverage_plugin.surgery.loading import load

__all__ = [
    "AlignmentModifier",
    "AttributionModifier",
    "ChannelPruningModifier",
    "CoverageError",
    "CoverageModifier",
    "Manifest",
    "load",
    "recipe_path",
]

if find_spec("llmcompressor") is not None:
    from llmcompressor.modifiers import ModifierFactory

    from moe_coverage_plugin import modifiers

    for _name in modifiers.__all__:
        ModifierFactory.register(_name, getattr(modifiers, _name))


def __getattr__(name: str) -> Any:
    # the compressing half is reached through the package, but a serving environment must not import it
    if name == "load":
        from moe_coverage_plugin.surgery.loading import load

        return load
    if name in __all__:
        from moe_coverage_plugin import modifiers

        return getattr(modifiers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
