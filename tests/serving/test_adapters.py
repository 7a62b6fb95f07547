"""Adapters that leave experts alone are served like the merged model; those that change experts are clear errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.adapters import check_adapter, check_layers, check_lora_options
from tests.serving.adapters import make_adapter, merge
from tests.serving.agreement import LARGEST_FLOAT32
from tests.serving.engine import checkpoint_path, expected_logprobs, prompt_logprobs
from tests.serving.test_engine import engine_on

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("self_attn.q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
LINEAR_ATTENTION = ("in_proj_qkvz", "in_proj_ba", "out_proj")
SHARED = ("mlp.gate", "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")

SERVED = {
    "ragged_fp32": ("mlp.gate", *ATTENTION),
    "ragged_w4a16": ("mlp.gate", *ATTENTION),
    "ragged_asymmetric": ATTENTION,
    "padded_w4a16": ATTENTION,
}
# not DeepSeek's first model: vLLM 0.32 does not load it with attention in 16 bits beside experts in 4
FAMILIES = {
    "ragged_shared_w4a16": ATTENTION,
    "ragged_mixtral": ATTENTION,
    "ragged_glm4": (*ATTENTION, *SHARED),
    "ragged_olmoe": ATTENTION,
    "ragged_deepseek_v2": LATENT,
    "ragged_deepseek_v3": LATENT,
    "ragged_ernie": (*ATTENTION, *SHARED),
    "ragged_minimax": ATTENTION,
    "ragged_granite_w4a16": ATTENTION,
}
IN_BFLOAT16 = {"ragged_bf16": ATTENTION, "ragged_qwen3_next": (*ATTENTION, *LINEAR_ATTENTION)}


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[Path, tuple[str, ...]], Path]:
    def make(checkpoint: Path, targets: tuple[str, ...]) -> Path:
        return make_adapter(checkpoint, tmp_path / f"adapter_{len(list(tmp_path.iterdir()))}", targets)

    return make


def differences(name: str, targets: tuple[str, ...], directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of an adapter's log-probabilities from those of the merged checkpoint, and without the adapter."""
    path = checkpoint_path(name)
    prompt_ids = expected_logprobs(path)[0]
    adapter = make_adapter(path, directory / "adapter", targets)
    with engine_on(path, enable_lora=True) as llm:
        found = torch.tensor(prompt_logprobs(llm, prompt_ids, LoRARequest("adapter", 1, str(adapter))))
        without = torch.tensor(prompt_logprobs(llm, prompt_ids))
    with engine_on(merge(path, adapter, directory / "merged")) as llm:
        merged = torch.tensor(prompt_logprobs(llm, prompt_ids))
    return (found - merged).abs(), (without - merged).abs()


@pytest.mark.engine
@pytest.mark.parametrize("name", [*SERVED, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_agrees_with_the_merged_model(tmp_path: Path, name: str) -> None:
    error, effect = differences(name, (SERVED | FAMILIES)[name], tmp_path)
    assert error.max() <= LARGEST_FLOAT32
    assert effect.median() > 0.1


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_agrees_with_the_merged_model_in_bfloat16(tmp_path: Path, name: str) -> None:
    """The merged weights are rounded, so single positions select other experts."""
    error, effect = differences(name, IN_BFLOAT16[name], tmp_path)
    assert error.median() < 0.03
    assert effect.median() > 0.3


@pytest.mark.engine
def test_adapters_that_cannot_be_served(adapter: Callable[[Path, tuple[str, ...]], Path]) -> None:
    """In the process that takes requests and in the one of the engine; afterwards the engine serves as before."""
    path = checkpoint_path("ragged_shared_w4a16")
    prompt_ids = expected_logprobs(path)[0]
    of_experts = str(adapter(path, ("q_proj", "experts.1.up_proj", "experts.2.up_proj")))
    of_a_gate = str(adapter(path, ("shared_expert_gate",)))
    with engine_on(path, enable_lora=True) as llm:
        before = prompt_logprobs(llm, prompt_ids)
        with pytest.raises(
            CoverageError, match=r"has \d+ tensors of experts .*experts\.1\.up_proj.* merge it with peft"
        ):
            prompt_logprobs(llm, prompt_ids, LoRARequest("request", 1, of_experts))
        with pytest.raises(CoverageError, match=r"has \d+ tensors of experts"):
            llm.llm_engine.add_lora(LoRARequest("loaded", 2, of_experts))
        # vLLM 0.32 leaves the layer as it was where the shared expert calls it
        with pytest.raises(CoverageError, match=r"changes 3 layers that vLLM does not adapt \(.*shared_expert_gate"):
            llm.llm_engine.add_lora(LoRARequest("ignored", 3, of_a_gate))
        assert prompt_logprobs(llm, prompt_ids) == before


def test_tensors_of_experts_are_found_by_their_names(tmp_path: Path) -> None:
    """Of one expert, of all in one tensor as PEFT names it, and in the other format; not those of shared experts."""
    tensor = torch.zeros(1)
    prefix = "base_model.model.model.layers.0"
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"{prefix}.mlp.shared_experts.up_proj.lora_A.weight": tensor}, file)
    check_adapter(tmp_path)
    for name in (
        "mlp.experts.3.up_proj.lora_A.weight",
        "mlp.experts.lora_A.weight",
        "block_sparse_moe.experts.base_layer.lora_B.weight",
    ):
        save_file({f"{prefix}.{name}": tensor}, file)
        with pytest.raises(CoverageError, match="1 tensors of experts"):
            check_adapter(tmp_path)
    tensors = load_file(file)
    file.unlink()
    check_adapter(tmp_path)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    with pytest.raises(CoverageError, match="1 tensors of experts"):
        check_adapter(tmp_path)


def test_the_layer_that_latent_attention_absorbs(tmp_path: Path) -> None:
    """vLLM 0.32 multiplies it into its neighbours, and log-probabilities differed by a median of 0.5."""
    save_file(
        {"model.layers.0.self_attn.kv_b_proj.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(CoverageError, match=r"tensors of kv_b_proj .* vLLM merges these"):
        check_adapter(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_proj", "experts"]}, "lora_target_modules has 'experts', .* name other layers"),
        ({"target_modules": ["model.layers.0.mlp.experts"]}, "lora_target_modules has 'model.layers.0.mlp.experts'"),
        ({"enable_moe_shared_loras": True}, "enable_moe_shared_loras is set, .* serve without it"),
        ({"enable_mixed_moe_lora_format": True}, "enable_mixed_moe_lora_format is set"),
    ],
)
def test_options_about_experts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        check_lora_options(LoRAConfig(**options))
    check_lora_options(LoRAConfig(target_modules=["q_proj", "shared_experts.up_proj"]))


def test_layers_that_an_option_leaves_out_are_a_warning(log: list[str]) -> None:
    config: Any = SimpleNamespace(target_modules=["q_proj"])
    check_layers(Path("adapter"), ["layers.0.o_proj", "layers.1.o_proj"], config)
    assert [line for line in log if "2 layers that lora_target_modules leaves out" in line]
    check_layers(Path("adapter"), [], config)
    assert len(log) == 1
