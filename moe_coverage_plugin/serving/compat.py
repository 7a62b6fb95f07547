"""All code that depends on the release or build of vLLM, except that of adapters, see ``adapters``.

Written for vLLM 0.26 (run on GPUs) and 0.32 (run on CPUs); names and signatures were also compared with 0.33. In these
releases an MoE layer is a runner (router, gate, shared experts) around ``RoutedExperts`` (weights), and the user's
process runs a hook for each architecture on the finished engine configuration. No function compares version numbers:
each one looks for a feature, which its docstring names. Lines marked ``# patch:`` are rows of ``docs/patches.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from inspect import getsource
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops  # loads the operators that are looked up below
from vllm import envs
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

VLLM_CPU_INT8_OPERATOR = "onednn_scaled_mm"
TRACKING = "enable_weights_track"
DRAFT_PREFIX = "draft_model."
NO_ONE_WIDTH = -1
"""Expert width on each rank if experts have no width in common; a method that allocates by it stops at once."""


def lacks_w4a16_linear() -> bool:
    """Return whether this build has no good kernel for 4-bit linear layers.

    Seen in 0.32. Decided by the platform, because all builds for CPUs are affected: the kernel that they choose has no
    operator in builds for AVX2. In builds for AVX-512 it takes 16-bit floats only and sums in them, which was 3 % off
    over 2048 channels in bfloat16.
    """
    # patch: cpu-w4a16-linear
    return current_platform.is_cpu()


def lacks_w4a16_moe() -> bool:
    """Return whether this build cannot be relied on for 4-bit experts of one width.

    Seen in 0.32. Decided by the platform: of the builds for CPUs, those for AVX2 have no operator for such experts.
    """
    # patch: cpu-w4a16-experts
    return current_platform.is_cpu()


def lacks_data_parallel_moe() -> bool:
    """Return whether this build cannot gather the tokens of data-parallel ranks for their experts.

    Seen in 0.32 for CPUs. Decided by whether the communicator for CPUs inherits ``all_gatherv``, which the base class
    does not implement.
    """
    if not current_platform.is_cpu():
        return False
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # patch: cpu-data-parallel
    return CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv


def lacks_expert_parallel_moe() -> bool:
    """Return whether this build's own kernels read experts that other ranks hold, which ends the process.

    Seen in 0.32 for CPUs, whose kernels say that they do not map experts to those of a rank, which nothing checks.
    Decided by the platform.
    """
    # patch: cpu-expert-parallel
    return current_platform.is_cpu()


def filters_experts_by_number(parallel: ParallelConfig) -> bool:
    """Return whether the loader reads only the experts whose numbers vLLM's own placement gives to a rank.

    Decided by the field of that name, which a release may lack.
    """
    return bool(getattr(parallel, "enable_ep_weight_filter", False))


def context_parallel_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share the tokens of a prompt.

    Decided by the field of that name, which a release may lack.
    """
    return getattr(parallel, "prefill_context_parallel_size", 1)


def experts_on_other_ranks(moe: FusedMoEConfig) -> int:
    """Return the number of a layer's experts that vLLM's own placement gives to other ranks of expert parallelism.

    The same in 0.26 and 0.32: ranks get equal numbers, and the first ones get one more if they do not divide evenly.
    """
    parallel = moe.moe_parallel_config
    if not parallel.use_ep:
        return 0
    return moe.num_experts - len(range(parallel.ep_rank, moe.num_experts, parallel.ep_size))


def loads_dummy_weights() -> bool:
    """Return whether the engine being built fills its parameters at random instead of reading a checkpoint.

    The same in 0.26 and 0.32. Decided by the load format.
    """
    return get_current_vllm_config().load_config.load_format == "dummy"


def require_all_weights(vllm_config: VllmConfig) -> None:
    """Make vLLM stop if a parameter finds no tensor; for quantized models it otherwise leaves the parameter at random.

    Written for 0.32. Decided by whether the source of the default loader contains the name of the option, because
    other loaders and releases without the option stop at it.
    """
    # patch: require-all-weights
    options: Any = vllm_config.load_config.model_loader_extra_config
    is_default = vllm_config.load_config.load_format in ("auto", "hf", "safetensors")
    if is_default and isinstance(options, dict) and TRACKING in getsource(DefaultModelLoader):
        options.setdefault(TRACKING, True)


def moe_runners() -> dict[str, Any]:
    """Return the runners of the engine being built by layer name; vLLM fills the table while it builds the model.

    The same in 0.26 and 0.32.
    """
    return get_current_vllm_config().compilation_config.static_forward_context


def no_quantization() -> FusedMoEQuantConfig:
    """Return the description of experts that vLLM's own kernels need not scale.

    The same in 0.26 and 0.32.
    """
    return FUSED_MOE_UNQUANTIZED_CONFIG


def activation_name(layer: torch.nn.Module) -> str:
    """Return the name of an MoE layer's activation.

    Decided by whether the activation has a ``value``: an enumeration in 0.26 and 0.32, a string before.
    """
    activation: Any = layer.activation
    return getattr(activation, "value", activation)


def swiglu_constants(layer: torch.nn.Module) -> dict[str, Any]:
    """Return the constants of the clamped or scaled SwiGLU that an MoE layer computes; empty for the plain one.

    Decided by the attributes that the layer has: releases differ in which of them exist.
    """
    names = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    return {name: value for name in names if (value := getattr(layer, name, None)) is not None}


def router_logits_dtype(moe: FusedMoEConfig) -> torch.dtype:
    """Return the dtype in which a layer's gate computes router logits.

    Decided by the field of that name; without it, or without a value, logits have the dtype of the layer's input.
    """
    return getattr(moe, "router_logits_dtype", None) or moe.in_dtype


def chooses_by_token_table(moe: FusedMoEConfig) -> bool:
    """Return whether a table of token ids chooses the experts of a layer, whatever its router logits are.

    Written for 0.32, the first release with such layers. Decided by the field ``has_hash_routing``.
    """
    return getattr(moe, "has_hash_routing", False)


def misrotates_heads() -> bool:
    """Return whether this build's rotary operator is wrong if heads are a dimension of their own.

    Multi-head latent attention calls the operator in this way, unless its positions are scaled. Seen in 0.32 for CPUs.
    Decided by rotating vectors of ones by 90 degrees, after which the even half must be -1.
    """
    # patch: cpu-latent-positions
    if not current_platform.is_cpu():
        return False
    size, heads = 64, torch.ones(2, 2, 64)
    quarter_turn = torch.cat([torch.zeros(1, size // 2), torch.ones(1, size // 2)], -1)
    torch.ops._C.rotary_embedding(torch.zeros(2, dtype=torch.long), heads, heads.clone(), size, quarter_turn, False)
    return not bool((heads[..., ::2] == -1).all())


def saturates_int8_products() -> bool:
    """Return whether this build adds pairs of 8-bit products in 16 bits, which large products overflow.

    Seen in 0.32 on CPUs without VNNI. Decided by multiplying the largest numbers.
    """
    # patch: cpu-int8-products
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
    """Return whether the user requires outputs that do not depend, bit for bit, on what else is in a batch.

    The same in 0.26 and 0.32.
    """
    return bool(envs.VLLM_BATCH_INVARIANT)


def gathers_tokens(moe: FusedMoEConfig) -> bool:
    """Return whether vLLM's runner gives a layer the tokens of several ranks, because our method does not fetch them.

    Decided by the sizes of groups that share tokens; a release may lack the one that splits prompts.
    """
    parallel = moe.moe_parallel_config
    return parallel.dp_size > 1 or getattr(parallel, "pcp_size", 1) > 1


@contextmanager
def without_short_padding_mask(tokens: int) -> Iterator[None]:
    """Hide vLLM's mask of padded tokens in this context if it is shorter than the tokens that are routed.

    The mask has this rank's tokens only, but the runner gathers those of all ranks before it routes. Routers for
    experts without groups stop then. Routers for groups stop, too, except on an idle rank: its mask of one token is
    broadcast, and no token of any rank gets an expert. Seen in 0.29 and 0.32; routers of 0.26 read no mask. Decided by
    its length.

    Args:
        tokens: number of tokens that are routed.
    """
    if not is_forward_context_available():
        yield
        return
    context = get_forward_context()
    is_padding_T = context.is_padding
    if is_padding_T is None or len(is_padding_T) >= tokens:
        yield
        return
    # patch: padding-of-one-rank
    context.is_padding = None
    try:
        yield
    finally:
        context.is_padding = is_padding_T


def name_in_checkpoint(prefix: str) -> str:
    """Return the name that a module's own model gives to it, which vLLM extends for a draft model.

    Ignore lists and targets of a checkpoint would not match the extended name, so vLLM would build layers quantized
    whose weights are not. Seen in 0.32. Decided by the prefix.
    """
    # patch: draft-prefix
    return prefix.removeprefix(DRAFT_PREFIX)


def complete_cpu_router(router: Any) -> None:
    """Make the router of a build for CPUs use correction biases and sigmoid scores.

    Seen in 0.32: the router does both only for experts in groups. Without groups it ignores the bias without a message
    and stops at sigmoid scores. One group of all experts selects the same experts, so the router gets one group.
    Decided by the router's attributes.
    """
    if not current_platform.is_cpu() or getattr(router, "use_grouped_topk", True) or router.custom_routing_function:
        return
    has_bias = router.e_score_correction_bias is not None
    if router.scoring_func == "sigmoid" or (router.scoring_func == "softmax" and has_bias):
        # patch: cpu-router-scores
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def lift_expert_width_check(is_unread: Callable[[Any], bool]) -> None:
    """Allow any number of ranks for experts in engines whose quantization config never reads the one expert width.

    vLLM asserts that the number of ranks divides that width while it describes a layer, before it asks for a method,
    and other layers are derived from the same number in the model's config. So the check is skipped in the description
    and the number is kept. Written for 0.26 and 0.32; a release without the check needs nothing.

    Args:
        is_unread: called with an engine's quantization config, which may be ``None``.

    Raises:
        AttributeError: the description of a layer has no such fields any more.
    """
    check = getattr(FusedMoEConfig, "__post_init__", None)
    if check is None or hasattr(check, "coverage_check"):
        return
    # now, because the check below runs for every model
    for description, name in ((FusedMoEConfig, "intermediate_size"), (FusedMoEParallelConfig, "tp_size")):
        if name not in {field.name for field in fields(description)}:
            raise AttributeError(f"vLLM's {description.__name__} has no field {name}")

    def check_unless_unread(moe: FusedMoEConfig) -> None:
        width = moe.intermediate_size
        if width % moe.moe_parallel_config.tp_size == 0 or not is_unread(get_current_vllm_config().quant_config):
            check(moe)
            return
        moe.intermediate_size = 0  # a multiple of every number
        check(moe)
        moe.intermediate_size = width
        moe.intermediate_size_per_partition = moe.intermediate_size_per_partition_unpadded = NO_ONE_WIDTH

    # a mark, so that the check is replaced once
    check_unless_unread.coverage_check = check  # pyright: ignore[reportFunctionMemberAccess]
    # patch: expert-width-check
    FusedMoEConfig.__post_init__ = check_unless_unread


def check_model_config(check: Callable[[str, Any], None]) -> None:
    """Run ``check`` on the path and the Hugging Face config of every model, in the user's process.

    vLLM asks quantization configs about a model only if its config has a ``quantization_config``. Written for 0.26 and
    0.32, in which ``ModelConfig`` decides that in one method.

    Args:
        check: raises an error if the model must not be loaded.

    Raises:
        AttributeError: ``ModelConfig`` has no such method any more.
    """
    verify = ModelConfig._verify_quantization
    if hasattr(verify, "coverage_check"):
        return

    @wraps(verify)
    def check_and_verify(model_config: ModelConfig) -> None:
        check(model_config.model, model_config.hf_config)
        verify(model_config)

    # a mark, so that the method is replaced once
    check_and_verify.coverage_check = verify  # pyright: ignore[reportAttributeAccessIssue]
    # patch: unquantized-checkpoints
    ModelConfig._verify_quantization = check_and_verify


def check_engine_config(architectures: Iterable[str], check: Callable[[VllmConfig], None]) -> None:
    """Run ``check`` on the configuration of every engine, in the user's process, from now on.

    An error in the engine's process reaches the user only as "see root cause above". vLLM's table of hooks by
    architecture is the one place outside its source that receives the complete configuration before that process
    starts. All of vLLM's architectures are entered, because a model of ours may be the draft of any other. Written for
    0.26 and 0.32, which both have the table.

    Args:
        architectures: names of model classes that vLLM may not list.
        check: raises an error if the engine must not start.
    """
    for architecture in {*architectures, *ModelRegistry.get_supported_archs()}:
        known = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if getattr(known, "coverage_check", None) is check:
            continue
        hook = {"coverage_check": staticmethod(check), "verify_and_update_config": _followed_by(known, check)}
        # patch: engine-config-hook
        MODELS_CONFIG_MAP[architecture] = type(f"Coverage{known.__name__}", (known,), hook)


def _followed_by(known: type[VerifyAndUpdateConfig], check: Callable[[VllmConfig], None]) -> staticmethod:
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        known.verify_and_update_config(vllm_config)
        check(vllm_config)

    return staticmethod(verify_and_update_config)
