"""Layers that predict several tokens (MTP) are left out, and everything that describes a checkpoint says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file, save_file

from moe_coverage_plugin import load
from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.files.mtp import is_mtp_name, mtp_layers
from moe_coverage_plugin.manifest import REPORT_NAME, Manifest
from tests.checkpoint.runs import config_json, logits, prune, source, tensors

pytestmark = pytest.mark.slow

EXPERTS, WIDTH, HIDDEN = 8, 128, 128
FAMILIES = {
    # family: the field of the config, where its layer is
    "qwen3_next": ("mtp_num_hidden_layers", "mtp.layers.0"),
    "qwen3_5_moe": ("mtp_num_hidden_layers", "mtp.layers.0"),
    "deepseek_v3": ("num_nextn_predict_layers", "model.layers.2"),
    "glm4_moe": ("num_nextn_predict_layers", "model.layers.2"),
}


def mtp_tensors(layer: str, fused: bool) -> dict[str, torch.Tensor]:
    """An MTP layer as published checkpoints have it; its experts are as large as the unpruned ones of the model."""
    generator = torch.Generator().manual_seed(3)
    shapes = {f"{layer}.input_layernorm.weight": (HIDDEN,), f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN)}
    shapes["mtp.fc.weight" if layer.startswith("mtp") else f"{layer}.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    if fused:
        shapes[f"{layer}.mlp.experts.gate_up_proj"] = (EXPERTS, 2 * WIDTH, HIDDEN)
        shapes[f"{layer}.mlp.experts.down_proj"] = (EXPERTS, HIDDEN, WIDTH)
    else:
        for expert in range(EXPERTS):
            for projection in ("gate_proj", "up_proj"):
                shapes[f"{layer}.mlp.experts.{expert}.{projection}.weight"] = (WIDTH, HIDDEN)
            shapes[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, WIDTH)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def with_mtp(directory: Path, family: str, fused: bool, sharded: bool = False) -> tuple[Path, dict[str, torch.Tensor]]:
    """A source with an MTP layer, in one file or in a file of its own."""
    path = source(directory, family)
    field, layer = FAMILIES[family]
    added = mtp_tensors(layer, fused)
    stored = load_file(path / "model.safetensors")
    if sharded:
        save_file(added, path / "model-mtp.safetensors", metadata={"format": "pt"})
        weight_map = dict.fromkeys(stored, "model.safetensors") | dict.fromkeys(added, "model-mtp.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        save_file(stored | added, path / "model.safetensors", metadata={"format": "pt"})
    config = config_json(path) | {field: 1}
    (path / "config.json").write_text(json.dumps(config))
    return path, added


@pytest.mark.parametrize("quantize", [False, True], ids=["16bit", "w4a16"])
@pytest.mark.parametrize(
    ("family", "layout", "fused", "sharded"),
    [
        ("qwen3_next", "ragged", False, False),
        ("qwen3_next", "padded", True, True),
        ("qwen3_5_moe", "ragged", True, False),
        ("deepseek_v3", "ragged", False, True),
        ("glm4_moe", "padded", False, False),
    ],
)
def test_they_are_left_out_and_this_is_said(tmp_path, family, layout, fused, sharded, quantize):
    """Field case 2.1: log, model card, report and config agree, and all readers open the checkpoint."""
    path, added = with_mtp(tmp_path / "source", family, fused, sharded)
    logged: list[str] = []
    sink = logger.add(logged.append, format="{message}", level="WARNING")
    try:
        model = prune(path, tmp_path / "out", layout, quantize=quantize)
    finally:
        logger.remove(sink)
    out = tmp_path / "out"
    size = sum(tensor.nbytes for tensor in added.values())
    (said,) = [line for line in logged if line.startswith("Not saved")]
    assert f"{len(added)} tensors, {size / 2**20:.1f} MiB" in said
    assert json.loads((out / REPORT_NAME).read_text())["mtp_left_out"] == {
        "layers": 1,
        "tensors": len(added),
        "size": size,
    }
    assert (
        f"| not included | layers that predict several tokens (MTP; {len(added)} tensors"
        in (out / "README.md").read_text()
    )
    config = config_json(out)
    assert config[FAMILIES[family][0]] == 0
    assert mtp_layers(config) == 0
    assert not [name for name in tensors(out) if is_mtp_name(name, config_json(path))]
    assert not [entry for entry in config.get("quantization_config", {}).get("ignore", []) if "mtp" in entry]
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    manifest = Manifest.from_checkpoint(out)
    assert manifest is not None
    check_checkpoint(out, manifest)
    opened = load(out)
    opened.save_pretrained(tmp_path / "again")
    # quantized weights are decompressed by load, and saved so
    assert quantize or (tmp_path / "again" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    assert mtp_layers(config_json(tmp_path / "again")) == 0
    assert "not included" in (tmp_path / "again" / "README.md").read_text(), "still said of a copy"
    assert torch.equal(logits(load(tmp_path / "again")), logits(opened))
    model.save_pretrained(tmp_path / "in_memory")
    assert config_json(tmp_path / "in_memory") == config


def test_a_config_that_counts_layers_without_files(tmp_path):
    """Field case 2.1: DeepSeek checkpoints whose MTP layer somebody removed."""
    path = source(tmp_path / "source", "deepseek_v3")
    assert config_json(path)["num_nextn_predict_layers"] == 1
    prune(path, tmp_path / "out")
    assert config_json(tmp_path / "out")["num_nextn_predict_layers"] == 0
    left_out = json.loads((tmp_path / "out" / REPORT_NAME).read_text())["mtp_left_out"]
    assert left_out == {"layers": 1, "tensors": 0, "size": 0}
    assert "none in the files of the base model" in (tmp_path / "out" / "README.md").read_text()


def test_models_without_them_say_nothing(tmp_path):
    """Field case 2.1: and have no such field."""
    prune(source(tmp_path / "source"), tmp_path / "out")
    assert "mtp_left_out" not in json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert "not included" not in (tmp_path / "out" / "README.md").read_text()
