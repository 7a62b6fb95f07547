"""All that depends on the version or build of vLLM, found by looking for features, never by comparing numbers.

Written against 0.32 and 0.26. Both build a mixture layer as a runner (router, gate, shared experts) around
``RoutedExperts`` (weights), and both run per-architecture hooks on the finished configuration in the parent process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import vllm._custom_ops  # noqa: F401  # loads the operators that the questions below are about
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VLLM_CPU_LINEAR_OPERATOR = "cpu_gemm_wna16"


def lacks_w4a16_linear() -> bool:
    """Whether this build chooses a 4-bit linear kernel whose operator it does not have (AVX2 builds for CPUs)."""
    return current_platform.is_cpu() and not hasattr(torch.ops._C, VLLM_CPU_LINEAR_OPERATOR)


def lacks_w4a16_moe() -> bool:
    """Whether this build has no kernel for 4-bit experts of one width (all builds for CPUs)."""
    return current_platform.is_cpu()


def loads_dummy_weights() -> bool:
    """Whether the engine being built fills its parameters at random instead of reading a checkpoint."""
    return get_current_vllm_config().load_config.load_format == "dummy"


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


def check_engine_config(architectures: Iterable[str], check: Callable[[VllmConfig], None]) -> None:
    """Have ``check`` look at the configuration of every engine of these architectures, in the user's own process.

    An error in the engine's process reaches the user only as "see root cause above". vLLM's table of hooks by
    architecture is the one place outside its source where the whole configuration is seen before that process starts.
    """
    for architecture in architectures:
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
