"""Structural compression of mixture-of-experts models: a plugin for llm-compressor, and one for vLLM.

Importing the package registers the modifiers with llm-compressor, at once or when llm-compressor is imported, and
imports neither torch nor a toolkit. vLLM finds :func:`moe_coverage_plugin.serving.register` by its entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.recipe_files import recipe_path
from moe_coverage_plugin.registration import register_modifiers

if TYPE_CHECKING:
    from moe_coverage_plugin.checkpoint.loading import load
    from moe_coverage_plugin.files.scores import load_scores, save_scores
    from moe_coverage_plugin.modifiers import (
        AlignmentModifier,
        AttributionModifier,
        ChannelPruningModifier,
        CoverageModifier,
        LayerwiseGPTQModifier,
        recommended_recipe,
    )
    from moe_coverage_plugin.recovery import RecoveryOptions, finetune
    from moe_coverage_plugin.sampling.dataset import sample_text

__all__ = [
    "AlignmentModifier",
    "AttributionModifier",
    "ChannelPruningModifier",
    "CoverageError",
    "CoverageModifier",
    "LayerwiseGPTQModifier",
    "Manifest",
    "RecoveryOptions",
    "finetune",
    "load",
    "load_scores",
    "recipe_path",
    "recommended_recipe",
    "sample_text",
    "save_scores",
]

register_modifiers()


def __getattr__(name: str) -> Any:
    # imported on first use, because llm-compressor is not installed in vLLM's environment
    if name in __all__:
        try:
            return _imported(name)
        except ModuleNotFoundError as error:
            if error.name != "llmcompressor":
                raise
            from moe_coverage_plugin.cli.environment import not_installed

            raise ModuleNotFoundError(f"{name}: {not_installed(error.name)}", name=error.name) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(name: str) -> Any:
    if name == "sample_text":
        from moe_coverage_plugin.sampling.dataset import sample_text

        return sample_text
    if name == "load":
        from moe_coverage_plugin.checkpoint.loading import load

        return load
    if name in ("load_scores", "save_scores"):
        from moe_coverage_plugin.files import scores as score_file

        return getattr(score_file, name)
    if name in ("RecoveryOptions", "finetune"):
        from moe_coverage_plugin import recovery

        return getattr(recovery, name)
    from moe_coverage_plugin import modifiers

    return getattr(modifiers, name)
