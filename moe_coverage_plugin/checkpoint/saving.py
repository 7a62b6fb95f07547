"""Saves a pruned model as a compressed-tensors directory with a manifest, a report and a model card."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload import disable_onloading, get_offloaded_device
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.core import active_session
from llmcompressor.transformers.utils import RECIPE_FILE_NAME
from loguru import logger
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.entry import loads_in_transformers, write_entry
from moe_coverage_plugin.checkpoint.expert_names import keep_family_names, stores_single_experts
from moe_coverage_plugin.checkpoint.model_card import write_card
from moe_coverage_plugin.checkpoint.origin import Origin
from moe_coverage_plugin.checkpoint.scheme_checks import check_rotations, check_schemes
from moe_coverage_plugin.checkpoint.staging import check_output, staged
from moe_coverage_plugin.manifest import REPORT_NAME, CoverageError, Layout, Manifest
from moe_coverage_plugin.modeling.moe_layers import check_merged, expert_linears, find_moe_layers


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
    """

    layout: Layout
    intermediate_size: int
    block_size: int
    provenance: dict[str, Any]
    report: dict[str, Any] = field(default_factory=dict)
    companions: list[Callable[[Path], None]] = field(default_factory=list)
    origin: Origin = field(default_factory=Origin)


def save_with_manifest(model: PreTrainedModel, record: PruningRecord) -> None:
    """Make ``model.save_pretrained`` write pruned checkpoints.

    Wraps the toolkit's own method, which must be in place. The directory appears under its name when everything is in
    it: files are written into a hidden directory beside it, which is then renamed.
    """
    # a model that is pruned again keeps the newest record only
    toolkit_save = getattr(model.save_pretrained, "_of_toolkit", model.save_pretrained)
    assert getattr(toolkit_save, "_overridden", False), "oneshot replaces save_pretrained before modifiers run"
    keep_family_names(model)
    model_ref = weakref.ref(model)

    @wraps(toolkit_save)
    def save_pretrained(save_directory: str | os.PathLike, **kwargs: Any) -> None:
        model = model_ref()
        assert model is not None
        if kwargs.get("push_to_hub"):
            raise CoverageError(
                "push_to_hub=True would upload before the checkpoint is complete: save, then upload_folder"
            )
        if getattr(model, "is_loaded_in_4bit", False):
            raise CoverageError(
                f"{model.name_or_path} was opened in the 4 bits of bitsandbytes, which engines cannot load and which "
                "are not saved: keep that checkpoint, or end the recipe with a W4A16 quantizer for a 4-bit checkpoint"
            )
        check_merged(model)
        target = Path(save_directory)
        check_output(target)
        quantized = any(is_module_quantized(module) for module in model.modules())
        if quantized:
            check_schemes(model, record.layout)
        check_rotations(model)
        if _on_disk(model):
            # transformers loads all tensors of a file before it writes it, and the toolkit writes files of 20 GB
            kwargs.setdefault("max_shard_size", largest_layer_bytes(model))
        with staged(target) as staging:
            toolkit_save(str(staging), **kwargs)
            if is_source_process():
                _add_companions(model, record, quantized, target.absolute().name, staging)
        if is_source_process():
            stored = sum(file.stat().st_size for file in target.glob("*.safetensors"))
            logger.info(f"Saved {target}: {stored / 2**20:.1f} MiB of weights")

    # the toolkit does not replace a method with this mark when the model enters oneshot again
    save_pretrained._overridden = True  # type: ignore[attr-defined]
    save_pretrained._of_toolkit = toolkit_save  # type: ignore[attr-defined]
    save_pretrained._record = record  # type: ignore[attr-defined]
    # patch: save-pretrained
    model.save_pretrained = save_pretrained  # type: ignore[method-assign]


def record_of(model: PreTrainedModel) -> PruningRecord:
    """Return the record of a pruned model; code that changes the weights further adds to it."""
    record = getattr(model.save_pretrained, "_record", None)
    assert isinstance(record, PruningRecord), "the model is not pruned"
    return record


def largest_layer_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all experts of the largest MoE layer."""
    with disable_onloading():
        layers = find_moe_layers(model)
        return max(sum(p.nbytes for linear in expert_linears(layer) for p in linear.parameters()) for layer in layers)


def _add_companions(
    model: PreTrainedModel, record: PruningRecord, quantized: bool, title: str, directory: Path
) -> None:
    """Write everything that is not a weight into a directory that has the weights."""
    _keep_recipe(model, directory)
    (directory / REPORT_NAME).write_text(json.dumps(record.report, indent=1))
    for write_companion in record.companions:
        write_companion(directory)
    widths = {layer.name: layer.widths for layer in find_moe_layers(model)}
    manifest = Manifest(record.layout, record.intermediate_size, widths, record.block_size, record.provenance)
    single_experts = stores_single_experts(model)
    stock = loads_in_transformers(record.layout, quantized, single_experts)
    write_card(directory, title, manifest, record.report, record.origin, quantized, stock)
    # last, because a directory without the entry is not opened as a checkpoint
    write_entry(directory, manifest, quantized, single_experts)


def _keep_recipe(model: PreTrainedModel, directory: Path) -> None:
    # the toolkit writes the recipe of its last run, even if that run was for another model
    source = Path(model.name_or_path or "") / RECIPE_FILE_NAME
    # patch: recipe-of-last-run
    if active_session().state.model is not model and source.is_file():
        shutil.copyfile(source, directory / RECIPE_FILE_NAME)


def _on_disk(model: torch.nn.Module) -> bool:
    return any(get_offloaded_device(module) == "disk" for module in model.modules())
