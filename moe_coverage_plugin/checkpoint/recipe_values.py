"""Writes the ``recipe.yaml`` of a model so that llm-compressor can read it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from llmcompressor.core import active_session
from llmcompressor.transformers.utils import RECIPE_FILE_NAME
from loguru import logger
from transformers import PreTrainedModel

from moe_coverage_plugin.options.recipes import stage_name

NUMBERED_STAGE = re.compile(r"^\w+_stage_\d+:", re.MULTILINE)
TAG = "tag:yaml.org,2002:python/"


# llm-compressor's mark of a field that is not set
NOT_SET = "object/apply:llmcompressor.sentinel.Sentinel"
_LEFT_OUT = object()


class _Values(yaml.SafeLoader):
    """Reads members of enumerations as their values and tuples as lists; creates no Python object."""


def _value(loader: _Values, suffix: str, node: yaml.Node) -> Any:
    arguments = loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else []
    if suffix == "tuple":
        return arguments
    if suffix == NOT_SET:
        return _LEFT_OUT
    # an enumeration is called with the value of the member
    if suffix.startswith("object/apply:") and len(arguments) == 1:
        return arguments[0]
    # an error would come after hours of work
    logger.warning(f"Left out of recipe.yaml: the Python object {suffix}, which llm-compressor cannot read")
    return _LEFT_OUT


_Values.add_multi_constructor(TAG, _value)


def recipe_of_run(model: PreTrainedModel) -> str:
    """Return the recipe of the current or last run of ``oneshot``, if that has or had this model; otherwise nothing.

    It begins with the recipe in the directory that the model was opened from.
    """
    session = active_session()
    if session.state is None or session.state.model is not model:
        return ""
    earlier = _beside(model)
    return session.lifecycle.recipe.yaml(existing_recipe_path=str(earlier) if earlier.is_file() else None)


def keep_recipe(model: PreTrainedModel, recipe: str, directory: Path) -> str:
    """Write the recipe of a model that is saved.

    Args:
        model: that is saved.
        recipe: kept with the model; empty if none was kept.
        directory: where llm-compressor wrote the recipe of its last run, even if that was for another model.

    Returns:
        The recipe to keep.
    """
    file, earlier = directory / RECIPE_FILE_NAME, _beside(model)
    # patch: recipe-of-last-run
    if not recipe_of_run(model):
        if recipe:
            file.write_text(recipe, encoding="utf-8")
        elif earlier.is_file():
            shutil.copyfile(earlier, file)
    if not file.is_file():
        return recipe
    write_values(file)
    return file.read_text(encoding="utf-8")


def _beside(model: PreTrainedModel) -> Path:
    return Path(model.name_or_path or "") / RECIPE_FILE_NAME


def write_values(recipe: Path) -> None:
    """Replace members of enumerations in a recipe by their values, leave out other Python objects, and name stages.

    llm-compressor skips the stages that it has numbered.

    Args:
        recipe: file that llm-compressor wrote.
    """
    text = recipe.read_text(encoding="utf-8")
    if "!!python/" not in text and not NUMBERED_STAGE.search(text):
        return
    # patch: recipe-objects
    # patch: numbered-stages
    content = _without_unset(_Values(text).get_single_data())
    if isinstance(content, dict):
        content = {stage_name(key) if NUMBERED_STAGE.match(f"{key}:") else key: each for key, each in content.items()}
    recipe.write_text(
        yaml.safe_dump(content, allow_unicode=True, sort_keys=False, default_flow_style=None, width=88),
        encoding="utf-8",
    )


def _without_unset(content: Any) -> Any:
    """Leave out fields that are not set, as llm-compressor does."""
    if isinstance(content, dict):
        return {key: _without_unset(value) for key, value in content.items() if value is not _LEFT_OUT}
    return [_without_unset(value) for value in content] if isinstance(content, list) else content
