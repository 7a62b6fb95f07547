"""What cannot be served is refused in the process that the user sees, before an engine process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError
from tests.serving.engine import checkpoint_path, open_engine


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint whose ``quantization_config`` a function edits."""

    def copy(name: str, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        source = checkpoint_path(name)
        config = json.loads((source / "config.json").read_text())
        edit(config["quantization_config"])
        for file in source.iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return copy


@pytest.fixture(autouse=True)
def _engine_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a refusal which only the engine's process speaks would not be heard here.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_unknown_schema_version(edited: Callable[..., Path]) -> None:
    path = edited("ragged_fp32", lambda config: config[CONFIG_KEY].update(version=99))
    with pytest.raises(ValueError, match="schema version 99, this release reads 1"):
        open_engine(path)


def test_experts_in_eight_bits(edited: Callable[..., Path]) -> None:
    path = edited("ragged_w4a16", lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=8))
    with pytest.raises(ValueError, match=r"experts has int8 weights, .* quantize the pruned model again"):
        open_engine(path)


def lose_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_packed"]


def narrow_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight_packed"
    tensors[name] = tensors[name][:, :-8].contiguous()


def revive_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    widths = json.loads((checkpoint_path("ragged_w4a16") / "config.json").read_text())["quantization_config"]
    (layer, experts), *_ = widths[CONFIG_KEY]["dead_experts"].items()
    tensors[f"{layer}.{experts[0]}.up_proj.weight_packed"] = torch.zeros(128, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_weight, r"layers\.1\.mlp\.experts expert 3 has width \d+ and so 3 weights, the checkpoint holds 2"),
        (narrow_a_weight, r"experts\.3\.down_proj\.weight_packed has shape .* not that of width"),
        (revive_an_expert, r"has width 0 and so 0 weights, the checkpoint holds 1"),
    ],
)
def test_tensors_that_do_not_fit_the_widths(
    edited: Callable[..., Path], damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = edited("ragged_w4a16")
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_engine(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel is set, .* serve without"),
        ({"enable_lora": True}, "enable_lora is set, .* merge the adapter"),
    ],
)
def test_engine_options(edited: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(edited("ragged_fp32"), **options)


def test_positions_that_the_build_gets_wrong(edited: Callable[..., Path]) -> None:
    """vLLM's operator for CPUs takes the heads of latent attention for tokens; it served other log-probabilities."""
    path = edited("ragged_deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"latent attention with rope_type 'default'.* rotates wrongly"):
        open_engine(path)


def test_activation_that_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model's code knows its activation, so it is told before weights are read, not before the start."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(CoverageError, match=r"has activation 'swigluoai'.* known are plain silu"):
        open_engine(checkpoint_path("ragged_gpt_oss"))
