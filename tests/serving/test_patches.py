"""Each test runs vLLM without one of our patches and finds the fault, so it fails as soon as the patch can go.

The patches are the rows of ``docs/patches.md``, which says what to remove when a test fails.
"""

from __future__ import annotations

import inspect
from inspect import getsource
from pathlib import Path
from types import ModuleType

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators import cpu_communicator
from vllm.lora import model_manager, utils
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.router import (
    fused_topk_bias_router,
    fused_topk_router,
    grouped_topk_router,
    router_factory,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.spec_decode import draft_model
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

from moe_coverage_plugin.serving import compat
from tests.serving.test_ranks import description

FEATURES = Path("/proc/cpuinfo").read_text().split() if current_platform.is_cpu() else []
ON_CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="a fault of builds for CPUs")
ON_AVX2 = pytest.mark.skipif("avx2" not in FEATURES or "avx512f" in FEATURES, reason="a fault of builds for AVX2")
WITHOUT_VNNI = pytest.mark.skipif(
    "avx2" not in FEATURES or not {"avx512_vnni", "avx_vnni"}.isdisjoint(FEATURES),
    reason="a fault on processors without VNNI",
)


def test_routers_take_no_list_of_removed_experts() -> None:
    parameters = inspect.signature(router_factory.create_fused_moe_router).parameters
    assert not [name for name in parameters if "prune" in name or "removed" in name or "mask" in name]


@pytest.mark.parametrize("router", [fused_topk_router, fused_topk_bias_router, grouped_topk_router])
def test_routers_mask_gathered_tokens_by_the_padding_of_one_rank(router: ModuleType) -> None:
    """vLLM's runner gathers hidden states and router logits before it routes, and nothing else."""
    assert "get_forward_context().is_padding\n" in getsource(router)
    assert "is_padding" not in getsource(moe_runner)


def test_names_of_draft_models_are_longer_than_those_of_their_checkpoints() -> None:
    """Of stock checkpoints as well: a layer in the ignore list is built quantized."""
    assert all('prefix="draft_model"' in getsource(module) for module in (draft_model, speculator))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    name = "model.layers.0.mlp.gate"
    config = CompressedTensorsConfig.from_config(
        {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": [name]}
    )
    linear = torch.nn.Linear(1, 1)
    assert config.get_scheme_dict(linear, name) is None
    assert config.get_scheme_dict(linear, f"draft_model.{name}") is not None
    assert config.get_scheme_dict(linear, compat.name_in_checkpoint(f"draft_model.{name}")) is None


def test_layers_assert_that_ranks_divide_one_width() -> None:
    with set_current_vllm_config(VllmConfig()), pytest.raises(AssertionError):
        description(512, 3)
    assert "assert self.intermediate_size % tp_size == 0" in getsource(
        getattr(FusedMoEConfig.__post_init__, "coverage_check", FusedMoEConfig.__post_init__)
    )


def test_quantization_configs_do_not_get_the_engine_configuration() -> None:
    methods = inspect.getmembers(QuantizationConfig, inspect.isfunction)
    assert not [name for name, method in methods if "vllm_config" in inspect.signature(method).parameters]


def test_models_without_quantization_are_not_shown_to_quantization_configs() -> None:
    verify = ModelConfig._verify_quantization
    source = getsource(getattr(verify, "coverage_check", verify))
    assert source.index("if quant_cfg is not None:") < source.index("override_quantization_method(")


def test_methods_of_experts_do_not_decide_about_adapters() -> None:
    source = getsource(utils.get_supported_lora_modules)
    assert "isinstance(module, (LinearBase, MoERunner))" in source
    assert "quant_method" not in source


def test_experts_that_no_option_names_are_left_out_without_a_message() -> None:
    source = getsource(model_manager.LoRAModelManager._create_lora_modules)
    assert source.index("not self._match_target_modules(module_name)") < source.index("isinstance(module, MoERunner)")
    names = getsource(getattr(WorkerLoRAManager._load_adapter, "coverage_check", WorkerLoRAManager._load_adapter))
    assert "target_modules" not in names


def test_requests_are_not_checked_against_their_adapters() -> None:
    validate = InputProcessor._validate_lora
    assert ".lora_path" not in getsource(getattr(validate, "coverage_check", validate))


def test_loaded_weights_of_quantized_models_are_not_tracked_by_default() -> None:
    assert "model_config.quantization is None and loaded_weights is not None" in getsource(DefaultModelLoader)


def test_cpu_router_without_groups_ignores_biases() -> None:
    bias = torch.zeros(8).index_fill(0, torch.tensor([5]), 100.0)
    router = CPURouter(2, 8, e_score_correction_bias=bias)
    logits = torch.arange(8.0).repeat(3, 1)
    _, ids = router.select_experts(hidden_states=torch.zeros(3, 4), router_logits=logits)
    assert 5 not in ids


def test_cpu_router_without_groups_stops_at_sigmoid_scores() -> None:
    router = CPURouter(2, 8, scoring_func="sigmoid")
    with pytest.raises(AssertionError):
        router.select_experts(hidden_states=torch.zeros(3, 4), router_logits=torch.zeros(3, 8))


@ON_CPU
def test_cpu_kernels_do_not_map_experts_to_those_of_a_rank() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    source = getsource(CPUUnquantizedExperts.apply)
    assert "expert_map" in source
    # the parameter, which nothing reads
    assert source.count("expert_map") == 1


@ON_AVX2
@pytest.mark.parametrize("operator", ["cpu_gemm_wna16", "fused_experts_cpu"])
def test_cpu_build_has_no_operators_for_4_bit_weights(operator: str) -> None:
    """Of linear layers and of experts. The build for AVX-512 has both, and sums the former in 16 bits."""
    assert not hasattr(torch.ops._C, operator)


def test_cpu_communicator_cannot_gather_tokens() -> None:
    inherited = ("all_gatherv", "reduce_scatterv")
    assert not [name for name in inherited if name in vars(cpu_communicator.CpuCommunicator)]


@ON_CPU
def test_cpu_build_rotates_heads_wrongly() -> None:
    assert compat.misrotates_heads()


@WITHOUT_VNNI
def test_products_of_8_bit_integers_overflow() -> None:
    assert compat.saturates_int8_products()


def test_cpu_worker_leaves_out_the_profile_run_in_eager_mode() -> None:
    assert "CompilationMode.NONE" in getsource(cpu_worker.CPUWorker._should_warm_up_model)


def test_triton_interpreter_multiplies_bits_of_bfloat16() -> None:
    from triton.runtime import interpreter

    source = getsource(interpreter.InterpreterBuilder.create_dot)
    assert "matmul" in source
    assert "bfloat16" not in source


def test_vllm_backend_of_lm_eval_looks_for_a_distribution_named_vllm() -> None:
    from importlib.util import find_spec

    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "models" / "vllm_causallms.py").read_text()
    assert 'version("vllm")' in text
