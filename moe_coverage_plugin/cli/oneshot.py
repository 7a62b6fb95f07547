"""``moe-coverage oneshot``: checks arguments that need no import of torch, then compresses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from moe_coverage_plugin.cli.environment import check_toolkit
from moe_coverage_plugin.cli.model_path import check_model
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.recipe_files import recipe_path


def run(arguments: Namespace) -> None:
    """Compress a model.

    Raises:
        CoverageError: a mistake in the arguments, the recipe or the data; all are found before calibration.
    """
    for option in ("samples", "sequence_length", "batch_size"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise CoverageError(f"--{option.replace('_', '-')} is {value}, but must be at least 1")
    check_toolkit("oneshot")
    recipe = arguments.recipe if Path(arguments.recipe).is_file() else recipe_path(arguments.recipe)
    _check_recipe(recipe)
    recipe_args = dict(map(_assignment, arguments.recipe_args))
    for path in map(Path, arguments.data):
        if not path.exists():
            raise CoverageError(
                f"--data {path} does not exist: give text, JSON lines, Parquet, CSV, or a directory of datasets"
            )
    check_model(arguments.model)

    from moe_coverage_plugin.cli.compression import compress

    compress(arguments, recipe, recipe_args)
    output = arguments.output
    print(f"Wrote {output}\n  moe-coverage inspect {output}    # widths, bytes, tensor-parallel degrees")
    print(f"  vllm serve {output}    # in vLLM's environment")


def _check_recipe(recipe: str) -> None:
    """Stop at modifiers that llm-compressor would skip without a message, because of the names above them."""
    try:
        content = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        # llm-compressor reads other formats, too, and reports files that it cannot read
        return
    found = False
    for stage, groups in _mappings(content):
        for group, modifiers in _mappings(groups):
            if not any(name.endswith("Modifier") for name, _ in _mappings(modifiers)):
                continue
            found = True
            right = [f"{stage.removesuffix('_stage')}_stage", f"{group.removesuffix('_modifiers')}_modifiers"]
            if [stage, group] != right:
                raise CoverageError(
                    f"recipe {recipe} has modifiers in the stage {stage!r}, group {group!r}, which llm-compressor "
                    f"skips because of these names: call them {right[0]!r} and {right[1]!r}"
                )
    if isinstance(content, dict) and not found:
        raise CoverageError(
            f"recipe {recipe} names no modifiers: they belong into a stage, as in prune_stage: prune_modifiers:, or "
            "start from a recipe of the package"
        )


def _mappings(content: Any) -> Iterator[tuple[str, Any]]:
    return ((str(key), value) for key, value in (content.items() if isinstance(content, dict) else ()))


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CoverageError(f"--recipe-args has {text!r}: write NAME=VALUE, for example sparsity=0.3")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise CoverageError(f"--recipe-args has {text!r}, and the value is not YAML: quote it") from error
