"""Checks of a ``oneshot`` call with our modifiers before the toolkit reads its recipe and its data."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.distributed import is_distributed
from datasets import Dataset
from llmcompressor.entrypoints.oneshot import Oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe

from moe_coverage_plugin.files.progress import check_unused, progress_directory
from moe_coverage_plugin.files.text_files import no_text
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options.recipes import MODIFIERS, modifiers_of, names_modifier_of_ours


def check_run(run: Oneshot) -> None:
    """Check the recipe, the data set and the output of a call; one without our modifiers is left to the toolkit.

    Raises:
        CoverageError: the toolkit would skip modifiers because of the names above them, the data set has no text, or
            another run with this output is in progress.
    """
    if _has_ours(run.recipe):
        _check_data(run)
        # ranks, which keep no progress, would find each other
        if run.output_dir is not None and not is_distributed():
            check_unused(progress_directory(run.output_dir))


def _has_ours(recipe: Any) -> bool:
    """Whether a recipe has modifiers of ours; stops at those in a file or string that the toolkit would skip."""
    if isinstance(recipe, list | tuple):
        # all of them, because each is checked
        return max(map(_has_ours, recipe), default=False)
    if isinstance(recipe, Recipe):
        return any(map(_has_ours, recipe.modifiers))
    if isinstance(recipe, Modifier):
        return any(each.__name__ in MODIFIERS for each in type(recipe).__mro__)
    if not isinstance(recipe, str):
        return False
    content, name = _read(recipe)
    ours = names_modifier_of_ours(content)
    if ours:
        modifiers_of(content, name)
    return ours


def _read(recipe: str) -> tuple[Any, str]:
    """Content of a recipe and its name; nothing for one that is not YAML, which the toolkit explains."""
    try:
        # false for a string that is too long for a path
        is_file = os.path.isfile(recipe)
        text = Path(recipe).read_text(encoding="utf-8") if is_file else recipe
        return yaml.safe_load(text), recipe if is_file else "in a string"
    except (OSError, ValueError, yaml.YAMLError):
        return None, recipe


def _check_data(run: Oneshot) -> None:
    """Stop at rows that the toolkit would leave out one by one, and then stop because none is left."""
    arguments, data = run.dataset_args, run.dataset_args.dataset
    if not isinstance(data, Dataset) or arguments.preprocessing_func is not None:
        return
    if len(data) == 0:
        raise CoverageError("the data set has 0 rows, but calibration needs at least 1: give text")
    read = {arguments.text_column, *getattr(run.processor, "model_input_names", ["input_ids"])}
    if run.processor is not None:
        processor: Any = run.processor
        read |= signature(processor.__call__).parameters.keys()
    if read.isdisjoint(data.column_names):
        raise CoverageError(no_text("the data set", arguments.text_column, data.column_names))
