"""Saves a pruned model as a compressed-tensors directory with a manifest, a report and a model card."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload import disable_onloading, get_offloaded_device
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.transformers.compression import compressed_tensors_utils
from loguru import logger
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.binding import METHOD, RECORD, Save, bind
from moe_coverage_plugin.checkpoint.calibrated_scales import watch_quantizers
from moe_coverage_plugin.checkpoint.entry import loads_in_transformers, write_entry
from moe_coverage_plugin.checkpoint.expert_names import fast_renaming, keep_family_names, stores_single_experts
from moe_coverage_plugin.checkpoint.left_out import LEFT_OUT_KEY, find_left_out
from moe_coverage_plugin.checkpoint.model_card import write_card
from moe_coverage_plugin.checkpoint.origin import Origin
from moe_coverage_plugin.checkpoint.pickling import make_picklable, one_decompress_hook
from moe_coverage_plugin.checkpoint.recipe_values import keep_recipe, recipe_of_run
from moe_coverage_plugin.checkpoint.saved_config import write_config
from moe_coverage_plugin.checkpoint.scheme_checks import check_rotations, check_schemes
from moe_coverage_plugin.checkpoint.staging import check_output, staged
from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import REPORT_NAME, CoverageError, Layout, Manifest
from moe_coverage_plugin.modeling.moe_layers import check_merged, expert_linears, find_moe_layers

# functions of llm-compressor that its save_pretrained calls
LEFT_OUT_STEPS = ("resave_config", "save_mtp_tensors_to_checkpoint")
SOURCE_STEPS = ("infer_recipe_from_model_path", "copy_python_files_from_model_cache")


@dataclass
class PruningRecord:
    """What is known about the pruning of a model, kept with the model until it is saved.

    Attributes:
        layout: how experts are stored.
        intermediate_size: channels of an expert before pruning.
        block_size: every width is a multiple of it.
        provenance: versions, source model, calibration data and recipe, for the manifest.
        report: figures of the pruning, for the report file.
        companions: functions that write further files, such as a tokenizer, into the directory they are given.
        origin: what the model card takes from the card of the base model.
        recipe: text of ``recipe.yaml``; empty if it is that of the run or of the directory the model is from.
        tokens: calibration tokens of the experts of each layer that was measured, for the manifest.
    """

    layout: Layout
    intermediate_size: int
    block_size: int
    provenance: dict[str, Any]
    report: dict[str, Any] = field(default_factory=dict)
    companions: list[Callable[[Path], None]] = field(default_factory=list)
    origin: Origin = field(default_factory=Origin)
    recipe: str = ""
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningRecord:
        """Copy what is added to when the copied model is changed; scores and pictures are shared."""
        return replace(
            self,
            provenance=deepcopy(self.provenance, memo),
            report=deepcopy(self.report, memo),
            companions=list(self.companions),
        )


def save_with_manifest(model: PreTrainedModel, record: PruningRecord) -> None:
    """Make ``model.save_pretrained`` write pruned checkpoints, also for copies of the model, pickled ones included.

    The directory appears under its name when everything is in it: files are written into a hidden directory beside it,
    which then takes its place.

    Args:
        model: pruned.
        record: a model that is pruned again keeps the newest record only.
    """
    keep_family_names(model)
    record.recipe = record.recipe or recipe_of_run(model)
    # the toolkit's method is bound to this object, and would save it for every copy; binding.py makes one for each
    vars(model).pop(METHOD, None)
    vars(model)[RECORD] = record
    bind(type(model), _save)
    make_picklable(model, _save)
    watch_quantizers()


def record_of(model: PreTrainedModel) -> PruningRecord:
    """Return the record of a pruned model; code that changes the weights further adds to it."""
    record = vars(model).get(RECORD)
    assert isinstance(record, PruningRecord), "the model is not pruned"
    return record


def _save(
    model: PreTrainedModel,
    record: PruningRecord,
    toolkit_save: Save,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    **kwargs: Any,
) -> None:
    """Save a pruned model.

    Args:
        model: whose weights and config are saved.
        record: of its pruning.
        toolkit_save: llm-compressor's ``save_pretrained`` of the model.
        save_directory: new, or without weights, or with an earlier checkpoint of the model, which is replaced.
        is_main_process: whether this process writes files, if there are several that do not share a group.
        kwargs: for ``toolkit_save``.

    Raises:
        CoverageError: an option that is not supported, a model that cannot be saved, or a directory with weights of
            another model.
    """
    _check_options(model, kwargs)
    check_merged(model)
    target = Path(save_directory)
    quantized = any(is_module_quantized(module) for module in model.modules())
    manifest = _manifest(model, record)
    check_output(target, manifest=manifest, quantized=quantized)
    if quantized:
        check_schemes(model, record.layout)
    check_rotations(model)
    if _on_disk(model):
        # transformers loads all tensors of a file before it writes it, and the toolkit writes files of 20 GB
        kwargs.setdefault("max_shard_size", largest_layer_bytes(model))
    writes = is_main_process and is_source_process()
    with staged(target, writes) as staging:
        with _without_steps_of_toolkit(), one_decompress_hook(model), fast_renaming():
            toolkit_save(str(staging), is_main_process=is_main_process, **kwargs)
        if writes:
            _add_companions(model, record, manifest, quantized, target.absolute(), staging)


def _check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    if options.get("push_to_hub"):
        raise CoverageError(
            "push_to_hub=True would upload before the checkpoint is complete: save, then upload_folder"
        )
    if options.get("variant") is not None:
        raise CoverageError(
            f"variant={options['variant']!r} gives weight files a name that readers of pruned checkpoints do not look "
            "for: leave it out, and choose another directory"
        )
    if getattr(model, "is_loaded_in_4bit", False):
        raise CoverageError(
            f"{model.name_or_path} was opened in the 4 bits of bitsandbytes, which engines cannot load and which "
            "are not saved: keep that checkpoint, or end the recipe with a W4A16 quantizer for a 4-bit checkpoint"
        )


def _unless_it_is_gone(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())
            logger.warning(f"{step.__name__} found nothing beside the model that this one was loaded from ({cause})")
            return None

    return run


@contextmanager
def _without_steps_of_toolkit() -> Iterator[None]:
    """Leave out two steps of llm-compressor's saving, and let two others fail.

    One replaces the model's config by the file of the model it was loaded from, which ``write_config`` merges instead.
    The second copies MTP layers, whose experts have other widths than the manifest says. The others look for a recipe
    and for Python files beside that model, which may be gone since.
    """
    own = {name: getattr(compressed_tensors_utils, name) for name in (*LEFT_OUT_STEPS, *SOURCE_STEPS)}
    # patch: source-config
    # patch: copied-mtp
    steps: dict[str, Callable[..., Any]] = dict.fromkeys(LEFT_OUT_STEPS, lambda *_: None)
    # patch: source-that-is-gone
    steps |= {name: _unless_it_is_gone(own[name]) for name in SOURCE_STEPS}
    try:
        for name, step in steps.items():
            setattr(compressed_tensors_utils, name, step)
        yield
    finally:
        for name, step in own.items():
            setattr(compressed_tensors_utils, name, step)


def largest_layer_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all experts of the largest MoE layer."""
    with disable_onloading():
        layers = find_moe_layers(model)
        return max(sum(p.nbytes for linear in expert_linears(layer) for p in linear.parameters()) for layer in layers)


def _manifest(model: PreTrainedModel, record: PruningRecord) -> Manifest:
    widths = {layer.name: layer.widths for layer in find_moe_layers(model)}
    fields = record.layout, record.intermediate_size, widths, record.block_size, record.provenance
    # counts name experts by their numbers, which change if the toolkit removes experts of a pruned model
    tokens = {name: counts for name, counts in record.tokens.items() if len(counts) == len(widths.get(name, ()))}
    return Manifest(*fields, tokens=tokens)


def _add_companions(
    model: PreTrainedModel, record: PruningRecord, manifest: Manifest, quantized: bool, target: Path, directory: Path
) -> None:
    """Write everything that is not a weight into a directory that has the weights."""
    if left_out := find_left_out(model):
        record.report[LEFT_OUT_KEY] = asdict(left_out)
        logger.warning(
            f"Not saved: {left_out}. transformers does not load them, and the config says that there are none"
        )
    write_config(model, directory)
    record.recipe = keep_recipe(model, record.recipe, directory)
    (directory / REPORT_NAME).write_text(json.dumps(record.report, indent=1))
    for write_companion in record.companions:
        write_companion(directory)
    single_experts = stores_single_experts(model)
    stock = loads_in_transformers(record.layout, quantized, single_experts)
    tokenizer = has_tokenizer(directory) or has_tokenizer(target)
    write_card(directory, target.name, manifest, record.report, record.origin, quantized, stock, tokenizer)
    # last, because a directory without the entry is not opened as a checkpoint
    write_entry(directory, manifest, quantized, single_experts)


def _on_disk(model: torch.nn.Module) -> bool:
    return any(get_offloaded_device(module) == "disk" for module in model.modules())
