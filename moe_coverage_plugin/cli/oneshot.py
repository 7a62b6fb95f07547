"""``moe-coverage oneshot``: checks arguments that need no import of torch, then compresses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moe_coverage_plugin.cli.early import check_oneshot_text
from moe_coverage_plugin.files.model_path import check_model
from moe_coverage_plugin.installation import PLACE, install_command
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options.recipes import MODIFIERS, check_fields, check_order, check_overrides, modifiers_of
from moe_coverage_plugin.recipe_files import recipe_path


def run(arguments: Namespace) -> None:
    """Compress a model.

    Raises:
        CoverageError: a mistake in the arguments, the recipe or the data; all are found before calibration.
    """
    for option in ("samples", "sequence_length", "batch_size"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise CoverageError(f"--{option.replace('_', '-')} is {value}, but must be at least 1")
    recipe = arguments.recipe if Path(arguments.recipe).is_file() else recipe_path(arguments.recipe)
    recipe_args = dict(map(_assignment, arguments.recipe_args))
    _check_recipe(recipe, recipe_args)
    check_model(arguments.model)
    check_oneshot_text(arguments)

    from moe_coverage_plugin.cli.compression import compress

    compress(arguments, recipe, recipe_args)
    output = arguments.output
    print(f"Wrote {output}\n  moe-coverage inspect {output}    # widths, bytes, tensor-parallel degrees")
    print("To serve it, in an environment of its own, because vLLM needs other packages than llm-compressor:")
    print(f"  python -m venv serve && {install_command('serve', pip='serve/bin/pip')}    # {PLACE}")
    print(f"  serve/bin/vllm serve {output}")


def _check_recipe(recipe: str, recipe_args: Mapping[str, Any]) -> None:
    """Stop at wrong fields, and at modifiers that llm-compressor would skip because of the names above them."""
    try:
        content = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        # llm-compressor also reads YAML at the top of a Markdown file
        if Path(recipe).suffix == ".md":
            return
        reason = " ".join(str(error).split())[:160]
        raise CoverageError(f"recipe {recipe} cannot be read as YAML ({reason}): correct it there") from error
    modifiers = modifiers_of(content, recipe)
    for name, fields in modifiers:
        check_fields(name, fields, recipe_args)
    check_order([name for name, _ in modifiers])
    if pruning := [MODIFIERS[name] for name, _ in modifiers if name in MODIFIERS]:
        check_overrides(recipe_args, {name for each in pruning for name in each.model_fields})


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CoverageError(f"--recipe-args has {text!r}: write NAME=VALUE, for example sparsity=0.3")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise CoverageError(f"--recipe-args has {text!r}, and the value is not YAML: quote it") from error
