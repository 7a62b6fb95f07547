"""Reads pruned checkpoints back into transformers, strict about every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_metadata import QuantizationMetadata
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from moe_coverage_plugin.calibration.expert_blocks import WIDTH_KEYS, find_expert_blocks
from moe_coverage_plugin.manifest import CONFIG_KEY, REPORT_NAME, CoverageError, Manifest, indexed_files
from moe_coverage_plugin.surgery.checkpoint import PruningRecord, save_with_manifest
from moe_coverage_plugin.surgery.expert_names import keep_family_names
from moe_coverage_plugin.surgery.experts import prune_block
from moe_coverage_plugin.surgery.router import mask_router

SINGLE_NAME = "model.safetensors"


def load(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Open a pruned checkpoint as a transformers model on the CPU whose experts have their own widths.

    4-bit weights are decompressed. The model can be run, fine-tuned, saved (``save_pretrained`` writes our layout
    again) and passed to ``oneshot`` to be quantized.

    Args:
        path: checkpoint directory, one file or sharded.
        dtype: cast floating-point weights; the checkpoint's own where not given. What a family keeps in float32, such
            as correction biases of routers, stays so.

    Raises:
        CoverageError: no pruned checkpoint, a tensor missing, left over, or of another shape than its manifest says.
    """
    path = Path(path)
    if not (path / "config.json").is_file() or (manifest := Manifest.from_checkpoint(path)) is None:
        raise CoverageError(
            f"{path} is no pruned checkpoint ({CONFIG_KEY} is not in its config.json): use AutoModelForCausalLM"
        )
    config, quantization = _read_config(path, manifest)
    stored_dtype = config.dtype
    assert isinstance(stored_dtype, torch.dtype), "AutoConfig resolves the dtype's name"
    model = _skeleton(config, manifest, dtype or stored_dtype)
    compressor = _expect_compressed(model, quantization) if quantization is not None else None
    _fill(model, path, dtype)
    if compressor is not None:
        compressor.decompress_model(model)
        for module in model.modules():
            QuantizationMetadata.clear_quantization(module)
        dtype_of = _dtypes(model, dtype or stored_dtype)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype_of(name))
    for block in find_expert_blocks(model):
        mask_router(block)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    modify_save_pretrained(model)
    report = json.loads((path / REPORT_NAME).read_text()) if (path / REPORT_NAME).is_file() else {}
    record = PruningRecord(
        manifest.layout, manifest.intermediate_size, manifest.block_size, manifest.provenance, report
    )
    save_with_manifest(model, record)
    return model.eval()


def _read_config(path: Path, manifest: Manifest) -> tuple[PretrainedConfig, dict[str, Any] | None]:
    """The model's config as it was before pruning, and its quantization where it has one."""
    config = AutoConfig.from_pretrained(path)
    config.__dict__.pop(CONFIG_KEY, None)
    quantization = dict(config.__dict__.pop("quantization_config", {}))
    text_config = config.get_text_config()
    setattr(text_config, next(key for key in WIDTH_KEYS if hasattr(text_config, key)), manifest.intermediate_size)
    config._name_or_path = str(path)
    quantization.pop(CONFIG_KEY, None)
    return config, quantization if quantization.get("config_groups") else None


def _skeleton(config: PretrainedConfig, manifest: Manifest, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights, its experts linear and at the widths of the manifest."""
    with init_empty_weights(include_buffers=False):
        # models that also see have no class for text alone
        text_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        factory = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        model = factory.from_config(config, dtype=dtype)
        for name, module in get_non_linearized_moes(model):
            linear_experts = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
            model.set_submodule(name, linear_experts(getattr(module, "config", config)))
        blocks = find_expert_blocks(model)
        if sorted(names := [block.name for block in blocks]) != sorted(manifest.widths):
            raise CoverageError(
                f"the manifest names the expert blocks {list(manifest.widths)}, {config.model_type} has {names}"
            )
        for block in blocks:
            widths = manifest.widths[block.name]
            if len(widths) != block.num_experts:
                raise CoverageError(
                    f"{block.name} has {block.num_experts} experts, its manifest lists {len(widths)} widths"
                )
            prune_block(block, [torch.arange(width) for width in widths])
    model.config._name_or_path = config._name_or_path
    keep_family_names(model)
    return model


def _expect_compressed(model: PreTrainedModel, quantization: dict[str, Any]) -> ModelCompressor:
    known = {key: value for key, value in quantization.items() if key in QuantizationConfig.model_fields}
    quantization_config = QuantizationConfig.model_validate(known)
    compressor = ModelCompressor(quantization_config=quantization_config)
    apply_quantization_config(model, quantization_config)
    compressor.compress_model(model)
    return compressor


def _fill(model: PreTrainedModel, path: Path, dtype: torch.dtype | None) -> None:
    """Assign every tensor of the checkpoint to the parameter or buffer it belongs to.

    None may be left on either side.
    """
    expected = _names_on_disk(model)
    dtype_of = _dtypes(model, dtype) if dtype is not None else None
    seen: set[str] = set()
    for file in tqdm(_shards(path), desc="Loading", disable=None):
        state: dict[str, torch.Tensor] = {}
        for disk_name, tensor in _read(file):
            if disk_name not in expected:
                raise CoverageError(
                    f"{file.name} holds {disk_name}, which the model described by its manifest does not have"
                )
            if disk_name in seen:
                raise CoverageError(f"{file.name} holds {disk_name} a second time: the checkpoint mixes two writings")
            name, wanted = expected[disk_name]
            _check_tensor(model, disk_name, name, tensor, wanted)
            state[name] = tensor.to(dtype_of(name)) if dtype_of and tensor.is_floating_point() else tensor
            seen.add(disk_name)
        model.load_state_dict(state, strict=False, assign=True)
    if missing := sorted(expected.keys() - seen):
        raise CoverageError(
            f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}: it was not written completely"
        )
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters()), "a parameter was left without a value"


def _dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """The dtype of a floating tensor by its name: families keep some, such as correction biases, in float32."""
    plan = model._get_dtype_plan(dtype)
    return lambda name: next((kept for part, kept in plan.items() if part in name), dtype)


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one file."""
    try:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - an open file is no mapping
                yield name, shard.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CoverageError(
            f"{file.name} cannot be read ({error}): it is absent or was cut off, copy the checkpoint again"
        ) from error


def _check_tensor(
    model: PreTrainedModel, disk_name: str, name: str, tensor: torch.Tensor, wanted: torch.Tensor
) -> None:
    if tensor.shape != wanted.shape:
        raise CoverageError(f"{disk_name} has shape {list(tensor.shape)}, the manifest says {list(wanted.shape)}")
    if tensor.is_floating_point() != wanted.is_floating_point():
        raise CoverageError(f"{disk_name} has dtype {tensor.dtype}, {wanted.dtype} was written: the file is damaged")
    module, _, attribute = name.rpartition(".")
    if attribute == "weight_shape":
        # the shape of a weight before packing, which decompression believes
        linear = model.get_submodule(module)
        shape = [linear.out_features, linear.in_features]
        if tensor.tolist() != shape:
            raise CoverageError(f"{disk_name} says {tensor.tolist()}, the manifest says {shape}: the file is damaged")


def _names_on_disk(model: PreTrainedModel) -> dict[str, tuple[str, torch.Tensor]]:
    """For every tensor name in the files: the name in the model, and the tensor there, without values.

    Tied copies are not in the files.
    """
    # not every family's configuration has the field
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    tied = set(model.all_tied_weights_keys) if ties else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    name_of = {id(tensor): name for name, tensor in state.items()}
    on_disk = revert_weight_conversion(model, dict(state))
    merged = [disk_name for disk_name, tensor in on_disk.items() if id(tensor) not in name_of]
    if merged:
        raise CoverageError(
            f"{type(model).__name__} stores {merged[0]} merged from several tensors: this family cannot be loaded"
        )
    return {disk_name: (name_of[id(tensor)], tensor) for disk_name, tensor in on_disk.items()}


def _shards(path: Path) -> list[Path]:
    names = indexed_files(path)
    return [path / name for name in ([SINGLE_NAME] if names is None else names)]
