"""What cannot be served stops with a clear error in the user's process, before an engine process starts."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.offload import OffloadConfig, UVAOffloadConfig

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.deployment import offloads
from tests.serving.engine import OPTIONS, checkpoint_path, open_engine

pytestmark = pytest.mark.engine


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint whose ``quantization_config`` a function edits."""

    def copy(name: str, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        source = checkpoint_path(name)
        config = json.loads((source / "config.json").read_text())
        edit(config["quantization_config"])
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return copy


@pytest.fixture(autouse=True)
def _engine_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # an error of the engine's process alone would not reach the test
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.fixture(autouse=True)
def _no_process_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test of this file starts an engine."""
    started: list[str] = []
    start = BaseProcess.start

    def noted(process: BaseProcess) -> None:
        started.append(process.name)
        start(process)

    monkeypatch.setattr(BaseProcess, "start", noted)
    yield
    assert started == []


def test_an_engine_would_have_started_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(process: BaseProcess) -> None:
        raise InterruptedError(f"{process.name} starts")

    monkeypatch.setattr(BaseProcess, "start", stop)
    with pytest.raises(InterruptedError, match="starts"):
        open_engine(checkpoint_path("ragged_fp32"))


def test_unknown_schema_version(edited: Callable[..., Path]) -> None:
    path = edited("ragged_fp32", lambda config: config[CONFIG_KEY].update(version=99))
    with pytest.raises(ValueError, match="schema version 99, this release reads 1"):
        open_engine(path)


def test_experts_in_eight_bits(edited: Callable[..., Path]) -> None:
    path = edited("ragged_w4a16", lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=8))
    with pytest.raises(ValueError, match=r"experts has int8 weights, .* quantize the pruned model again"):
        open_engine(path)


def remove_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_packed"]


def narrow_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight_packed"
    tensors[name] = tensors[name][:, :-8].contiguous()


def add_a_removed_expert(tensors: dict[str, torch.Tensor]) -> None:
    widths = json.loads((checkpoint_path("ragged_w4a16") / "config.json").read_text())["quantization_config"]
    (layer, experts), *_ = widths[CONFIG_KEY]["removed_experts"].items()
    tensors[f"{layer}.{experts[0]}.up_proj.weight_packed"] = torch.zeros(128, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_weight, r"layers\.1\.mlp\.experts expert 3 has width \d+ and so 3 weights, the checkpoint holds 2"),
        (narrow_a_weight, r"experts\.3\.down_proj\.weight_packed has shape .* not the shape of .* integers of 4 bits"),
        (add_a_removed_expert, r"has width 0 and so 0 weights, the checkpoint holds 1"),
    ],
)
def test_tensors_that_do_not_fit_the_widths(
    edited: Callable[..., Path], damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = edited("ragged_w4a16")
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_engine(path)


def test_widths_of_a_layout_that_stock_methods_serve(edited: Callable[..., Path]) -> None:
    """Stock methods copy a narrower tensor into a buffer of the config's width and leave the rest unchanged."""
    path = edited("padded_w4a16")
    tensors = load_file(path / "model.safetensors")
    narrow_a_weight(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"experts\.3\.down_proj\.weight_packed has shape .* not the shape of .* integers of 4 bits"
    ):
        open_engine(path)


# --- files


def cut_off(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def link_out(path: Path) -> None:
    outside = shutil.move(path / "model.safetensors", path.parent / "outside.safetensors")
    (path / "model.safetensors").symlink_to(outside)


def climb_out(path: Path) -> None:
    shutil.move(path / "model.safetensors", path.parent / "outside.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')


def list_a_missing_shard(path: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_instead(path: Path) -> None:
    (path / "model.safetensors").unlink()
    marker = path / "unpickled"
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker)))


class Touch:
    """Leaves a directory behind when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["ragged_w4a16", "padded_w4a16"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"model\.safetensors cannot be read .* was cut off, copy the checkpoint again"),
        (link_out, r"model\.safetensors is a link to .*outside\.safetensors, outside of"),
        (climb_out, r"lists '\.\./outside\.safetensors', but only"),
        (list_a_missing_shard, r"lacks model-2\.safetensors, which is one of 2 files"),
        (pickle_instead, r"holds no weights, neither model\.safetensors\.index\.json nor any"),
    ],
)
def test_files_that_are_cut_off_or_elsewhere(
    edited: Callable[..., Path], name: str, damage: Callable[[Path], None], message: str
) -> None:
    path = edited(name)
    damage(path)
    with pytest.raises(ValueError, match=message):
        open_engine(path)
    assert not (path / "unpickled").exists()


def test_an_entry_that_was_changed(edited: Callable[..., Path]) -> None:
    """A changed width before pruning, which no tensor contradicts."""
    path = edited("ragged_fp32", lambda config: config[CONFIG_KEY].update(intermediate_size=1024))
    with pytest.raises(ValueError, match="entry does not match its sha256"):
        open_engine(path)


def test_what_a_run_leaves_that_is_killed_while_it_saves() -> None:
    """Weights are complete but config.json is missing: without our entry a stock engine would fill in random ones."""
    from vllm import LLM

    path = checkpoint_path("half_written", "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(str(path), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
            "expert_placement_strategy is 'round_robin', .* serve without",
        ),
        ({"enable_lora": True, "lora_target_modules": ["experts"]}, "lora_target_modules has 'experts'"),
    ],
)
def test_engine_options(edited: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(edited("ragged_fp32"), **options)


@pytest.mark.parametrize("option", [{"cpu_offload_gb": 1}, {"offload_group_size": 2}])
def test_offloading(option: dict[str, Any]) -> None:
    """Experts would stay on the device and be in memory twice."""
    path = checkpoint_path("ragged_fp32")
    with pytest.raises(ValueError, match=r"weights are to be offloaded .* --tensor-parallel-size"):
        open_engine(path, **option)
    names = "cpu_offload_params" if "cpu_offload_gb" in option else "offload_params"
    with pytest.raises(ValueError, match="weights are to be offloaded"):
        open_engine(path, **option, **{names: {"self_attn", "experts"}})


def test_offloading_of_other_parameters() -> None:
    manifest = Manifest.from_checkpoint(checkpoint_path("ragged_fp32"))
    assert manifest is not None
    uva = UVAOffloadConfig(cpu_offload_gb=1, cpu_offload_params={"self_attn"})
    assert not offloads(OffloadConfig(uva=uva), manifest)
    assert not offloads(OffloadConfig(), manifest)


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT is set, .* serve without it"):
        open_engine(checkpoint_path("ragged_fp32"))


def test_draft_models() -> None:
    """Also beside a model of another class that is not ours: vLLM has no hook for draft models."""
    speculative = {"method": "draft_model", "model": str(checkpoint_path("ragged_fp32")), "num_speculative_tokens": 1}
    target = checkpoint_path("sources/qwen2_moe_torch.float32")
    message = r"the draft model .*ragged_fp32 cannot be served: weights are to be offloaded"
    with pytest.raises(ValueError, match=message):
        open_engine(target, speculative_config=speculative, offload_group_size=2, offload_params={"experts"})


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("name", ["ragged_glm4", "ragged_deepseek_v3"])
def test_layers_that_predict_several_tokens(tmp_path: Path, layers: int, name: str) -> None:
    """Field case 2.1: configs count no such layers, those of earlier releases do; vLLM divides by the count."""
    shutil.copytree(checkpoint_path(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": layers}
    if not config["quantization_config"]["config_groups"]:
        # as in 16-bit checkpoints of one width
        config[CONFIG_KEY] = config.pop("quantization_config")[CONFIG_KEY]
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match="has method 'mtp', but a pruned checkpoint holds no layer"):
        open_engine(tmp_path, speculative_config=speculative)


def test_models_run_by_transformers() -> None:
    """Options are checked there, too, and so are routers that would choose removed experts."""
    placed = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"}
    with pytest.raises(ValueError, match="expert_placement_strategy is 'round_robin'"):
        open_engine(checkpoint_path("ragged_fp32"), model_impl="transformers", **placed)
    with pytest.raises(ValueError, match="routers may still choose experts that were removed"):
        open_engine(checkpoint_path("ragged_olmoe"), model_impl="transformers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds for cards get them right")
def test_positions_that_the_build_gets_wrong(edited: Callable[..., Path]) -> None:
    """vLLM's operator for CPUs takes the heads of latent attention for tokens, which gave other log-probabilities."""
    path = edited("ragged_deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"latent attention with rope_type 'default'.* rotates wrongly"):
        open_engine(path)


def test_products_of_8_bit_integers() -> None:
    """The product of the largest numbers shows the same fault as a layer of many channels."""
    if torch.cuda.is_available():
        assert not compat.saturates_int8_products()
        return
    from vllm import _custom_ops as ops

    weight, scale = torch.randint(-127, 128, (64, 128), dtype=torch.int8).t(), torch.ones(64, 1)
    handler = ops.create_onednn_scaled_mm(weight, scale, torch.float32, True, False)
    x, x_scale, _ = ops.onednn_scaled_int8_quant(torch.randn(16, 128))
    product = torch.empty(16, 64)
    ops.onednn_scaled_mm(handler, x, product, x_scale, None, None, None)
    is_right = torch.allclose(product, x.float() @ weight.float() * x_scale, rtol=1e-4)
    assert compat.saturates_int8_products() is not is_right


def test_products_that_the_build_gets_wrong(edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def add_attention(config: dict[str, Any]) -> None:
        int8 = {"num_bits": 8, "type": "int", "symmetric": True}
        config["config_groups"]["attention"] = {
            "targets": ["re:.*self_attn.*_proj$"],
            "weights": int8 | {"strategy": "channel"},
            "input_activations": int8 | {"strategy": "token", "dynamic": True},
        }

    monkeypatch.setattr(compat, "saturates_int8_products", lambda: True)
    with pytest.raises(ValueError, match=r"self_attn.* int8 weights and activations, whose products overflow"):
        open_engine(edited("ragged_w4a16", add_attention))


def test_activation_that_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model's code has the activation, so the error comes before weights are read, not before the start."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(CoverageError, match=r"has activation 'swigluoai'.* known are plain silu"):
        open_engine(checkpoint_path("ragged_gpt_oss"))
