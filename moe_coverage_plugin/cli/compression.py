"""Runs llm-compressor's ``oneshot`` with the arguments of the command line, on text from files."""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe
from transformers import PreTrainedModel, set_seed

from moe_coverage_plugin.calibration.text import IDS
from moe_coverage_plugin.checkpoint.opening import DISK, OFFLOAD, explained, open_model
from moe_coverage_plugin.checkpoint.saving import PruningRecord
from moe_coverage_plugin.checkpoint.staging import check_output
from moe_coverage_plugin.cli.calibration_data import read_data, with_own_text
from moe_coverage_plugin.files.atomic import in_use
from moe_coverage_plugin.files.progress import check_unused, progress_directory
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modifiers.oneshot_run import is_ours
from moe_coverage_plugin.modifiers.quantizers import check_quantizers
from moe_coverage_plugin.modifiers.rehearsal import check_before_text


def compress(arguments: Namespace, recipe: str, recipe_args: Mapping[str, Any]) -> None:
    """Compress a model by a recipe and write the checkpoint.

    Args:
        arguments: of ``moe-coverage oneshot``.
        recipe: path of the recipe.
        recipe_args: values for fields of our modifiers, by name.

    Raises:
        CoverageError: the output exists, or recipe, data or model cannot be used; before calibration.
    """
    output = Path(arguments.output)
    check_output(output)
    check_unused(progress_directory(output))
    modifiers = _modifiers(recipe)
    ours = any(map(is_ours, modifiers))
    if recipe_args and not ours:
        raise CoverageError(
            f"--recipe-args {', '.join(recipe_args)} change nothing in {recipe}, which has no modifier of this "
            "package: edit the recipe"
        )
    set_seed(arguments.seed)
    given = read_data(arguments)
    with offload_folder(output, arguments.device_map) as folder:
        model = open_model(arguments.model, arguments.device_map, folder)
        _compress(model, given, arguments, recipe, recipe_args, modifiers)


def _compress(
    model: PreTrainedModel,
    given: Dataset | None,
    arguments: Namespace,
    recipe: str,
    recipe_args: Mapping[str, Any],
    modifiers: Sequence[Modifier],
) -> None:
    ours = any(map(is_ours, modifiers))
    options: dict[str, Any] = {"recipe_args": recipe_args} if recipe_args else {}
    if isinstance(record := getattr(model.save_pretrained, "_record", None), PruningRecord) and not ours:
        # a pruned checkpoint is only quantized; with our modifiers in the recipe, they make this check
        check_quantizers(model, [], modifiers, record.block_size, record.layout)
    if ours:
        check_before_text(model, modifiers, recipe_args)
    data = with_own_text(given, model, arguments)
    oneshot(
        model=model,
        dataset=data,
        num_calibration_samples=len(data),
        max_seq_length=arguments.sequence_length or _longest(data),
        batch_size=arguments.batch_size,
        # windows are spread evenly over the text already, and a fixed order gives the same result in each run
        shuffle_calibration_samples=False,
        # quantizers need each expert to see all tokens; our scores count routed tokens only
        moe_calibrate_all_experts=any(
            modifier.requires_calibration_data for modifier in modifiers if not is_ours(modifier)
        ),
        recipe=recipe,
        output_dir=arguments.output,
        **options,
    )


@contextmanager
def offload_folder(output: Path, device_map: str | None) -> Iterator[Path | None]:
    """Create a directory beside the output for links to the weights on disk, and for those that change.

    Args:
        output: directory of the checkpoint.
        device_map: place of the weights.

    Yields:
        The directory, which is deleted afterwards; ``None`` if no weight is on disk.
    """
    if device_map not in (OFFLOAD, DISK):
        yield None
        return
    target = Path(os.path.realpath(output))
    target.parent.mkdir(parents=True, exist_ok=True)

    def create() -> Path:
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))

    # one that a killed run leaves is removed by the check of the output
    with in_use(create) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _modifiers(recipe: str) -> list[Modifier]:
    """Return the modifiers of a recipe, for checks; the run creates its own.

    Raises:
        CoverageError: the toolkit cannot read the recipe, or it has no modifiers.
    """
    with explained(f"recipe {recipe} cannot be read"):
        modifiers = Recipe.create_instance(recipe).modifiers
    if not modifiers:
        raise CoverageError(f"recipe {recipe} names no modifiers: start from a recipe of the package")
    return modifiers


def _longest(data: Dataset) -> int:
    return max((len(ids) for ids in data[IDS]), default=0)
