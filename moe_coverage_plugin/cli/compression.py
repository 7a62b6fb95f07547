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
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe
from llmcompressor.utils.dev import load_context
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from moe_coverage_plugin.calibration.text import IDS
from moe_coverage_plugin.checkpoint.loading import load
from moe_coverage_plugin.checkpoint.saving import PruningRecord
from moe_coverage_plugin.checkpoint.staging import check_output
from moe_coverage_plugin.cli.calibration_data import explained, read_data, with_own_text
from moe_coverage_plugin.files.atomic import in_use
from moe_coverage_plugin.files.progress import check_unused, progress_directory
from moe_coverage_plugin.files.weights import SUFFIX
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.modeling.lazy_modules import unload_image_processors
from moe_coverage_plugin.modeling.memory import free_host_memory
from moe_coverage_plugin.modeling.released_experts import released_experts
from moe_coverage_plugin.modifiers.oneshot_run import is_ours
from moe_coverage_plugin.modifiers.quantizers import check_quantizers

# places of weights besides those of transformers
OFFLOAD, DISK = "auto_offload", "disk"


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


def open_model(model: str, device_map: str | None, offload_folder: Path | None = None) -> PreTrainedModel:
    """Open a model with its experts as linear modules, without a second copy of them in memory.

    Args:
        model: directory or name.
        device_map: as of ``moe-coverage oneshot``; ``None``: host memory.
        offload_folder: directory for weights on disk, which must exist as long as the model.

    Raises:
        CoverageError: it cannot be opened, or host memory is too small for it.
    """
    path = Path(model)
    if path.is_dir() and Manifest.from_checkpoint(path) is not None:
        if device_map is not None:
            raise CoverageError(f"{model} has {CONFIG_KEY} and is opened on the CPU: leave out --device-map")
        return load(path)
    if device_map is None and path.is_dir():
        _check_host_memory(path)
    unload_image_processors()
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if device_map == DISK:
        options["device_map"] = {"": DISK}
    if offload_folder is not None:
        options["offload_folder"] = str(offload_folder)
    opener = load_context() if device_map in (OFFLOAD, DISK) else load_quantizable_moe()
    with explained(f"{model} cannot be opened as a model"), opener, released_experts():
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False, **options)


def _check_host_memory(path: Path) -> None:
    """Check that weights fit into host memory; files of which pages are dropped would be read again in each pass."""
    needed, free = sum(file.stat().st_size for file in path.glob(f"*{SUFFIX}")), free_host_memory()
    if needed > free:
        raise CoverageError(
            f"the weights of {path} take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of host memory are free"
            f": give --device-map {OFFLOAD}, which leaves on disk what does not fit"
        )
