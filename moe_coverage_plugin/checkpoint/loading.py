"""Opens pruned checkpoints in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedModel

from moe_coverage_plugin.checkpoint.decompression import decompress, expect_compressed
from moe_coverage_plugin.checkpoint.model_config import convert_errors, read_config
from moe_coverage_plugin.checkpoint.origin import read_origin
from moe_coverage_plugin.checkpoint.saving import PruningRecord, save_with_manifest
from moe_coverage_plugin.checkpoint.skeleton import build_skeleton
from moe_coverage_plugin.checkpoint.tensors import read_tensors
from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.manifest import CONFIG_KEY, REPORT_NAME, CoverageError, Manifest, read_json, report_layers
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.nf4 import check_config, quantize_linears
from moe_coverage_plugin.modeling.router_mask import mask_router


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """Open a pruned checkpoint as a transformers model on the CPU whose experts have their own widths.

    Quantized weights are decompressed. Activations and the key-value cache are not quantized, even if engines quantize
    them (``FP8_DYNAMIC``); a warning says so. The model can be run, fine-tuned, saved (``save_pretrained`` writes the
    same layout again) and passed to ``oneshot`` to be quantized. With a ``quantization_config`` it can be run and
    moved to a device, but not saved.

    Args:
        path: checkpoint directory, with one weight file or several.
        dtype: cast floating-point weights to it; by default they keep the dtype of the checkpoint. Tensors that a
            family keeps in float32, such as correction biases of routers, stay in float32.
        trust_remote_code: run Python files of the checkpoint that its config names as the model's code. Without it
            these files are not used if transformers has the architecture itself; otherwise ``load`` stops.
        quantization_config: ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` quantizes the linear
            layers of a 16-bit checkpoint, those of attention as well, to the 4 bits of bitsandbytes. Routers, gates of
            shared experts and the output head are left out, as are modules in its ``llm_int8_skip_modules``. Every
            width works; multiples of 64 have faster kernels. Needs the extra ``nf4``.

    Raises:
        CoverageError: the directory is not a pruned checkpoint, or a damaged or incomplete one
            (:func:`~.integrity.check_checkpoint`, as in all readers); a tensor is missing, left over, or of another
            shape than the model has; the checkpoint needs code that is not trusted; or the ``quantization_config`` is
            not supported.
    """
    path = Path(path)
    file = path / "config.json"
    stored = read_json(file) if file.is_file() else {}
    if (manifest := Manifest.of_config(stored, file)) is None:
        raise CoverageError(
            f"{path} is not a pruned checkpoint ({CONFIG_KEY} is not in its config.json): use AutoModelForCausalLM"
        )
    tensors = check_checkpoint(path, manifest, stored)
    report = _read_report(path / REPORT_NAME)
    config, quantization = read_config(path, manifest, tensors, trust_remote_code)
    if quantization_config is not None:
        check_config(quantization_config, path, quantization is not None)
    assert isinstance(config.dtype, torch.dtype), "read_config checks it"
    model_dtype = dtype or config.dtype
    model = build_skeleton(config, manifest, model_dtype, trust_remote_code)
    compressor = expect_compressed(model, quantization) if quantization is not None else None
    read_tensors(model, tensors, dtype)
    if compressor is not None:
        decompress(model, compressor, model_dtype)
    if quantization_config is not None:
        quantize_linears(model, quantization_config)
    for layer in find_moe_layers(model):
        mask_router(layer)
    if (path / "generation_config.json").is_file():
        with convert_errors(path / "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    modify_save_pretrained(model)
    record = PruningRecord(
        manifest.layout,
        manifest.intermediate_size,
        manifest.block_size,
        manifest.provenance,
        report,
        origin=read_origin(str(path)),
        tokens=manifest.tokens or _tokens(report, manifest),
    )
    save_with_manifest(model, record)
    return model.eval()


def _tokens(report: dict[str, Any], manifest: Manifest) -> dict[str, list[int]]:
    """Return the calibration tokens in the report of a checkpoint whose entry has none, if they fit its experts."""
    found = {name: layer.get("tokens") for name, layer in report_layers(report).items()}
    try:
        return replace(manifest, tokens=found).tokens
    except CoverageError:
        return {}


def _read_report(file: Path) -> dict[str, Any]:
    """Read the figures of the pruning under the keys of this release; empty if there is no report."""
    if not file.is_file():
        return {}
    report = read_json(file)
    layers = report_layers(report)
    report.pop("blocks", None)
    return report | {"layers": layers} if layers else report
