"""Makes adapters of random values, as PEFT saves them, and checkpoints that they are merged into."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moe_coverage_plugin.manifest import CHECKSUM_KEY, CONFIG_KEY, checksum
from moe_coverage_plugin.serving.packing import dequantize, unpack_zero_points

RANK, ALPHA = 4, 8


def make_adapter(checkpoint: Path, directory: Path, targets: tuple[str, ...]) -> Path:
    """Write an adapter of the layers whose names end like that, so large that it changes log-probabilities by 0.5."""
    adapter: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for module, weight in linear_weights(load_file(checkpoint / "model.safetensors"), targets).items():
        rows, columns = weight.shape
        prefix = f"base_model.model.{module}"
        adapter[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
        adapter[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 10
    assert adapter, f"{checkpoint} has no layers {targets}"
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(targets)}
    directory.mkdir()
    save_file(adapter, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(checkpoint: Path, adapter: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint with an adapter merged into it; 4-bit layers that it changes become 16-bit ones."""
    shutil.copytree(checkpoint, directory)
    tensors, factors = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    ends = ".lora_A.weight"
    modules = [name.removesuffix(ends).removeprefix("base_model.model.") for name in factors if name.endswith(ends)]
    ignored: list[str] = []
    for module, weight in linear_weights(tensors, tuple(modules)).items():
        a, b = (factors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        for name in [name for name in tensors if name.startswith(f"{module}.weight_")]:
            del tensors[name]
            ignored.append(module)
        tensors[f"{module}.weight"] = (weight.float() + ALPHA / RANK * b @ a).to(weight.dtype)
    save_file(tensors, directory / "model.safetensors")
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if ignored:
        config["quantization_config"]["ignore"] += sorted({*ignored})
        # the record of tensors names the packed ones
        entry = (config | config["quantization_config"])[CONFIG_KEY]
        entry.pop("contents", None)
        entry[CHECKSUM_KEY] = checksum(entry)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def linear_weights(tensors: dict[str, torch.Tensor], ends: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Plain weights of linear layers by module path, of those whose paths end like that; packed ones are unpacked."""
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(ends) or kind not in ("weight", "weight_packed"):
            continue
        if kind == "weight_packed":
            scale, shape = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_shape"]
            words = tensors.get(f"{module}.weight_zero_point")
            zero_point = None if words is None else unpack_zero_points(words, len(tensor))
            tensor = dequantize(tensor, scale, int(shape[1]), zero_point)
        found[module] = tensor
    return found
