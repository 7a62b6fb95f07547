"""``moe-coverage oneshot``: the toolkit's entry point on the command line, with our recipes and text from files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, load_from_disk
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe
from llmcompressor.utils.dev import load_context
from loguru import logger
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from moe_coverage_plugin.checkpoint.loading import load
from moe_coverage_plugin.checkpoint.saving import PruningRecord, check_output
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.modeling.lazy_modules import forget_lazy_modules
from moe_coverage_plugin.modifiers.oneshot_run import is_ours
from moe_coverage_plugin.modifiers.quantizers import check_quantizers
from moe_coverage_plugin.recipe_files import recipe_path
from moe_coverage_plugin.recovery.text import IDS, pack

LONGEST = 2048
OFFLOAD = "auto_offload"


def run(arguments: Namespace) -> None:
    """Compress a model.

    Raises:
        CoverageError: anything that can be told from the arguments, the recipe and the data, before calibration.
    """
    for option in ("samples", "sequence_length", "batch_size"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise CoverageError(f"--{option.replace('_', '-')} is {value}, at least 1 is right")
    output = Path(arguments.output)
    check_output(output)
    recipe = arguments.recipe if Path(arguments.recipe).is_file() else recipe_path(arguments.recipe)
    modifiers = _modifiers(recipe)
    ours = any(map(is_ours, modifiers))
    recipe_args = dict(map(_assignment, arguments.recipe_args))
    if recipe_args and not ours:
        raise CoverageError(
            f"--recipe-args {', '.join(recipe_args)} override nothing in {recipe}, which has no modifier of this "
            "package: edit the recipe"
        )
    set_seed(arguments.seed)
    data = _data(arguments)
    options: dict[str, Any] = {"recipe_args": recipe_args} if recipe_args else {}
    model = _open(arguments.model, arguments.device_map)
    if isinstance(record := getattr(model.save_pretrained, "_record", None), PruningRecord) and not ours:
        # no width changes, and none of our modifiers does it
        check_quantizers(model, [], modifiers, record.block_size, record.layout)
    oneshot(
        model=model,
        dataset=data,
        num_calibration_samples=len(data),
        max_seq_length=arguments.sequence_length or _longest(data),
        batch_size=arguments.batch_size,
        # windows are spread evenly over the text already, and one order gives one result
        shuffle_calibration_samples=False,
        # quantizers need every expert to see every token; our own scores count routed tokens only
        moe_calibrate_all_experts=any(
            modifier.requires_calibration_data for modifier in modifiers if not is_ours(modifier)
        ),
        recipe=recipe,
        output_dir=str(output),
        **options,
    )
    print(f"Wrote {output}\n  moe-coverage inspect {output}    # what is in it\n  vllm serve {output}")


def _modifiers(recipe: str) -> list[Modifier]:
    """What a recipe names, apart from the run that it is for.

    Raises:
        CoverageError: the toolkit cannot read the recipe, or there is nothing in it.
    """
    with _told(f"recipe {recipe} cannot be read"):
        modifiers = Recipe.create_instance(recipe).modifiers
    if not modifiers:
        raise CoverageError(f"recipe {recipe} names no modifiers: start from one that comes with the package")
    return modifiers


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CoverageError(f"--recipe-args has {text!r}, name=value is right, as in sparsity=0.3")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise CoverageError(f"--recipe-args has {text!r}, of which the value is no YAML: quote it") from error


def _data(arguments: Namespace) -> Dataset:
    """Windows of token ids, evenly spread over all that is given.

    Raises:
        CoverageError: files that are absent or hold no text, too little of it, or no tokenizer beside the model.
    """
    first, *others = map(Path, arguments.data)
    text: Sequence[Path] | Dataset = [first, *others]
    if first.is_dir():
        if others:
            raise CoverageError(f"--data names a data set, {first}, and {len(others)} more: give it alone, or files")
        with _told(f"{first} is no data set that datasets.save_to_disk wrote"):
            saved = load_from_disk(str(first))
        if not isinstance(saved, Dataset):
            raise CoverageError(f"{first} holds several splits: name one of them, {first / str(next(iter(saved)))}")
        if IDS in saved.column_names:
            return saved.select(_spread(len(saved), arguments.samples))
        text = saved
    for path in text if isinstance(text, list) else ():
        if not path.is_file():
            raise CoverageError(f"--data {path} is not there: give text, JSON lines, or a directory of datasets")
    with _told(f"{arguments.model} has no tokenizer that can be opened"):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    length = arguments.sequence_length or _default_length(arguments.model)
    ids_WS = pack(text, tokenizer, arguments.text_field, length).ids_WS
    # rows first: as Python integers, text takes many times its bytes
    return Dataset.from_dict({IDS: ids_WS[_spread(len(ids_WS), arguments.samples)].tolist()})


def _default_length(model: str) -> int:
    with _told(f"{model} is no model that can be opened"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    return min(LONGEST, getattr(config, "max_position_embeddings", LONGEST))


def _spread(windows: int, samples: int) -> list[int]:
    if windows < samples:
        logger.warning(f"{samples} calibration samples were asked for, the data holds {windows}: all are taken")
    return torch.linspace(0, windows - 1, min(samples, windows)).long().tolist()


def _longest(data: Dataset) -> int:
    return max((len(ids) for ids in data[IDS]), default=0)


def _open(model: str, device_map: str | None) -> PreTrainedModel:
    """The model with its experts as linear modules, which costs no copy of them.

    Raises:
        CoverageError: it cannot be opened.
    """
    path = Path(model)
    if (path / "config.json").is_file() and Manifest.from_checkpoint(path) is not None:
        if device_map is not None:
            raise CoverageError(f"{model} has {CONFIG_KEY} and opens on the CPU: leave --device-map out")
        return load(path)
    forget_lazy_modules()
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    opener = load_quantizable_moe() if device_map != OFFLOAD else load_context()
    with _told(f"{model} is no model that can be opened"), opener:
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False, **options)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Around a toolkit's reading of what the user named, which fails with any exception there is."""
    try:
        yield
    except CoverageError:
        raise
    except Exception as error:
        raise CoverageError(f"{what} ({type(error).__name__}: {error})") from error
