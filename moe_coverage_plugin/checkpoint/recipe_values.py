"""Writes ``recipe.yaml`` so that llm-compressor can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from loguru import logger

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


def write_values(recipe: Path) -> None:
    """Replace members of enumerations in a recipe by their values, and leave out other Python objects.

    Args:
        recipe: file that llm-compressor wrote.
    """
    text = recipe.read_text(encoding="utf-8")
    if "!!python/" not in text:
        return
    # patch: recipe-objects
    content = _Values(text).get_single_data()
    recipe.write_text(
        yaml.safe_dump(
            _without_unset(content), allow_unicode=True, sort_keys=False, default_flow_style=None, width=88
        ),
        encoding="utf-8",
    )


def _without_unset(content: Any) -> Any:
    """Leave out fields that are not set, as llm-compressor does."""
    if isinstance(content, dict):
        return {key: _without_unset(value) for key, value in content.items() if value is not _LEFT_OUT}
    return [_without_unset(value) for value in content] if isinstance(content, list) else content
