"""Prepares a model for the tensors of a quantized checkpoint, and decompresses them once they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_metadata import QuantizationMetadata
from loguru import logger
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.model_config import convert_errors
from moe_coverage_plugin.checkpoint.tensors import names_on_disk, parameter_dtypes
from moe_coverage_plugin.manifest import CONFIG_KEY


def expect_compressed(model: PreTrainedModel, quantization: dict[str, Any]) -> ModelCompressor:
    """Replace the weights of a model without weights by the tensors of their quantized form.

    Args:
        model: its module names are those that ``quantization`` targets.
        quantization: ``quantization_config`` of the checkpoint.

    Returns:
        The compressor for :func:`decompress`.

    Raises:
        CoverageError: the quantization cannot be read.
    """
    known = {key: value for key, value in quantization.items() if key in QuantizationConfig.model_fields}
    # checkpoints of the first release have a status that stops transformers
    if known.get("quantization_status") == CONFIG_KEY:
        known["quantization_status"] = QuantizationStatus.COMPRESSED
    with convert_errors(Path(model.config._name_or_path) / "config.json"):
        quantization_config = QuantizationConfig.model_validate(known)
    # patch: ignored-names
    quantization_config.ignore = _module_names(model, quantization_config.ignore or [])
    compressor = ModelCompressor(quantization_config=quantization_config)
    apply_quantization_config(model, quantization_config)
    compressor.compress_model(model)
    for module in model.modules():
        _expect_packed_zero_point(module)
    if unquantized := _unquantized_by_load(quantization_config):
        logger.warning(f"Engines quantize the {unquantized} of {model.name_or_path}, which load() does not")
    return compressor


def decompress(model: PreTrainedModel, compressor: ModelCompressor, dtype: torch.dtype) -> None:
    """Replace quantized weights by plain ones, in place.

    Args:
        model: with the tensors of the checkpoint.
        compressor: what :func:`expect_compressed` returned.
        dtype: of the decompressed weights.
    """
    compressor.decompress_model(model)
    # the toolkit dispatched the model: its caches return copies on the accelerator, which lose a change of dtype
    # patch: dispatched-model
    remove_dispatch(model)
    for module in model.modules():
        QuantizationMetadata.clear_quantization(module)
    dtype_of = parameter_dtypes(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name))


def _module_names(model: PreTrainedModel, ignore: list[str]) -> list[str]:
    """Translate an ignore list; the toolkit writes some of its names as they are in the files."""
    module_of = {disk: name for disk, (name, _) in names_on_disk(model).items()}
    return [module_of.get(f"{entry}.weight", f"{entry}.weight").removesuffix(".weight") for entry in ignore]


def _expect_packed_zero_point(module: Module) -> None:
    """Give zero points their packed shape; the compressor does so only for tensors with values."""
    zero_point = getattr(module, "weight_zero_point", None)
    if zero_point is None or not hasattr(module, "weight_packed"):
        return
    weights = cast(QuantizationScheme, module.quantization_scheme).weights
    assert weights is not None, "only weights have zero points"
    packed = pack_to_int32(torch.zeros(zero_point.shape, dtype=torch.int8), weights.num_bits, packed_dim=0)
    # patch: packed-zero-points
    module.weight_zero_point = Parameter(packed.to("meta"), requires_grad=False)


def _unquantized_by_load(quantization: QuantizationConfig) -> str:
    """Return what besides weights is quantized, ``activations and key-value cache``; empty if nothing is."""
    schemes = [each for each in quantization.config_groups.values() if isinstance(each, QuantizationScheme)]
    activations = any(each.input_activations or each.output_activations for each in schemes)
    cache = quantization.kv_cache_scheme is not None
    return " and ".join(["activations"] * activations + ["key-value cache"] * cache)
