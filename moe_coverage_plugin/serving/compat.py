"""All that depends on the version or build of vLLM, found by looking for features, never by comparing numbers.

Written against 0.32 and 0.26. Both build a mixture layer as a runner (router, gate, shared experts) around
``RoutedExperts`` (weights), and both run per-architecture hooks on the finished configuration in the parent process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getsource
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops  # loads the operators that the questions below are about
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VLLM_CPU_INT8_OPERATOR = "onednn_scaled_mm"
TRANSFORMERS_BACKENDS = "Transformers"
TRACKING = "enable_weights_track"
NO_ONE_WIDTH = -1
"""Channels on each rank where experts have no width in common; a method that allocates by it stops at once."""


def lacks_w4a16_linear() -> bool:
    """Whether this build has no good kernel for 4-bit linear layers (all builds for CPUs).

    The one that they choose has no operator in builds for AVX2. In those for AVX-512 it takes 16-bit floats only, and
    sums in them: over 2048 channels in bfloat16 it was 3 % off (0.32).
    """
    return current_platform.is_cpu()


def lacks_w4a16_moe() -> bool:
    """Whether this build has no kernel for 4-bit experts of one width (all builds for CPUs)."""
    return current_platform.is_cpu()


def lacks_data_parallel_moe() -> bool:
    """Whether this build cannot gather the tokens of data-parallel ranks for their experts (all builds for CPUs)."""
    if not current_platform.is_cpu():
        return False
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv


def loads_dummy_weights() -> bool:
    """Whether the engine being built fills its parameters at random instead of reading a checkpoint."""
    return get_current_vllm_config().load_config.load_format == "dummy"


def require_all_weights(vllm_config: VllmConfig) -> None:
    """Have vLLM stop where a parameter finds no tensor; for quantized models it leaves it at random otherwise."""
    options: Any = vllm_config.load_config.model_loader_extra_config
    # other loaders, and those of earlier releases, stop at an option that they do not know
    is_default = vllm_config.load_config.load_format in ("auto", "hf", "safetensors")
    if is_default and isinstance(options, dict) and TRACKING in getsource(DefaultModelLoader):
        options.setdefault(TRACKING, True)


def mixture_layers() -> dict[str, Any]:
    """Runners of the engine being built by layer name; filled while the model is constructed."""
    return get_current_vllm_config().compilation_config.static_forward_context


def no_quantization() -> FusedMoEQuantConfig:
    """The description of experts that vLLM's own kernels need not know how to scale."""
    return FUSED_MOE_UNQUANTIZED_CONFIG


def activation_name(layer: torch.nn.Module) -> str:
    """Name of a mixture layer's activation, which is an enumeration or a string."""
    activation: Any = layer.activation
    return getattr(activation, "value", activation)


def swiglu_constants(layer: torch.nn.Module) -> dict[str, Any]:
    """Constants of clamped or scaled SwiGLU variants that a mixture layer asks for; empty for the plain one."""
    names = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    return {name: value for name in names if (value := getattr(layer, name, None)) is not None}


def chooses_by_token_table(moe: FusedMoEConfig) -> bool:
    """Whether a table of token ids chooses the experts of a layer, whatever its router's logits are.

    Releases before 0.32 know no such layers.
    """
    return getattr(moe, "has_hash_routing", False)


def misrotates_heads() -> bool:
    """Whether this build's rotary operator is wrong where heads are a dimension of their own (0.32 for CPUs).

    That is how multi-head latent attention calls it, unless its positions are scaled. Asked by a quarter turn.
    """
    if not current_platform.is_cpu():
        return False
    size, heads = 64, torch.ones(2, 2, 64)
    quarter_turn = torch.cat([torch.zeros(1, size // 2), torch.ones(1, size // 2)], -1)
    torch.ops._C.rotary_embedding(torch.zeros(2, dtype=torch.long), heads, heads.clone(), size, quarter_turn, False)
    return not bool((heads[..., ::2] == -1).all())


def saturates_int8_products() -> bool:
    """Whether this build sums pairs of 8-bit products in 16 bits, which large ones overflow (CPUs without VNNI).

    Asked by a product of the largest numbers.
    """
    if not current_platform.is_cpu() or not hasattr(torch.ops._C, VLLM_CPU_INT8_OPERATOR):
        return False
    channels, scale = 8, torch.ones(1, 1)
    weight = torch.full((channels, 1), torch.iinfo(torch.int8).max, dtype=torch.int8)
    handler = ops.create_onednn_scaled_mm(weight, scale, torch.float32, True, False)
    x, x_scale, _ = ops.onednn_scaled_int8_quant(torch.ones(1, channels))
    product = torch.empty(1, 1)
    ops.onednn_scaled_mm(handler, x, product, x_scale, None, None, None)
    return not torch.allclose(product, weight.float().sum())


def wants_batch_invariance() -> bool:
    """Whether answers are to be the same, bit for bit, whatever else is in a batch."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def complete_cpu_router(router: Any) -> None:
    """Let the router of a build for CPUs read correction biases and sigmoid scores.

    In 0.32 it does so only for experts in groups: elsewhere it passes over the bias without a word, and stops at
    sigmoid scores. One group of all experts is the same choice, so that is what it is told.
    """
    if not current_platform.is_cpu() or getattr(router, "use_grouped_topk", True) or router.custom_routing_function:
        return
    has_bias = router.e_score_correction_bias is not None
    if router.scoring_func == "sigmoid" or (router.scoring_func == "softmax" and has_bias):
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def lift_expert_width_check(is_unread: Callable[[Any], bool]) -> None:
    """Let any number of ranks share experts in engines whose quantization config never reads the one expert width.

    vLLM asserts that the ranks divide that width while it describes a layer, before it asks for a method, and in the
    model's config other layers are derived from the same number. So it is the description that is spared the check.

    Args:
        is_unread: called with an engine's quantization config, which may be ``None``.
    """
    check = getattr(FusedMoEConfig, "__post_init__", None)
    if check is None or hasattr(check, "coverage_check"):
        return

    def check_unless_unread(moe: FusedMoEConfig) -> None:
        width = moe.intermediate_size
        if width % moe.moe_parallel_config.tp_size == 0 or not is_unread(get_current_vllm_config().quant_config):
            check(moe)
            return
        moe.intermediate_size = 0  # every number divides it
        check(moe)
        moe.intermediate_size = width
        moe.intermediate_size_per_partition = moe.intermediate_size_per_partition_unpadded = NO_ONE_WIDTH

    check_unless_unread.coverage_check = check  # pyright: ignore[reportFunctionMemberAccess]  # a mark: lifted once
    FusedMoEConfig.__post_init__ = check_unless_unread


def check_engine_config(architectures: Iterable[str], check: Callable[[VllmConfig], None]) -> None:
    """Have ``check`` look at the configuration of every engine of these architectures, in the user's own process.

    An error in the engine's process reaches the user only as "see root cause above". vLLM's table of hooks by
    architecture is the one place outside its source where the whole configuration is seen before that process starts.
    """
    # by what runs the model, which may be transformers
    backends = (name for name in ModelRegistry.get_supported_archs() if name.startswith(TRANSFORMERS_BACKENDS))
    for architecture in (*architectures, *backends):
        known = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if getattr(known, "coverage_check", None) is check:
            continue
        hook = {"coverage_check": staticmethod(check), "verify_and_update_config": _followed_by(known, check)}
        MODELS_CONFIG_MAP[architecture] = type(f"Coverage{known.__name__}", (known,), hook)


def _followed_by(known: type[VerifyAndUpdateConfig], check: Callable[[VllmConfig], None]) -> staticmethod:
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        known.verify_and_update_config(vllm_config)
        check(vllm_config)

    return staticmethod(verify_and_update_config)
