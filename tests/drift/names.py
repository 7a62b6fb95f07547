"""What this package uses of llm-compressor and vLLM by name only, or through values without a type.

Imports, calls, overridden methods and attributes of values with a known type are read from the sources, see ``check``.
"""

from __future__ import annotations

from typing import NamedTuple

THEIRS = ("llmcompressor", "compressed_tensors", "transformers", "vllm")

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
ROUTED_EXPERTS = f"{FUSED_MOE}.RoutedExperts"
WNA16 = "vllm.model_executor.layers.quantization.compressed_tensors.schemes.CompressedTensorsWNA16"
LINEAR_EXPERTS = "llmcompressor.modeling.moe.linear_experts.LinearExperts2D"
WRAP_SAVING = "llmcompressor.transformers.compression.compressed_tensors_utils.modify_save_pretrained"
OURS = "moe_coverage_plugin"


class Named(NamedTuple):
    """Names that must exist in ``owner``: members of a class or module, or texts and attributes within a function."""

    owner: str
    names: tuple[str, ...]
    reason: str


class StandIn(NamedTuple):
    """A function of ours that is called instead of theirs, with its first ``given`` parameters bound."""

    ours: str
    theirs: str
    given: int
    reason: str


# by the package that a half of ours needs
NAMED = {
    "vllm": (
        Named(
            f"{FUSED_MOE}.MoERunner", ("router",), "read from the engine's table of layers, whose values have type Any"
        ),
        Named(
            "compressed_tensors.quantization.QuantizationArgs",
            ("type", "num_bits", "strategy", "symmetric", "group_size", "actorder"),
            "inside the dictionaries that vLLM keeps of a scheme",
        ),
        Named(f"{FUSED_MOE}.MoEActivation", ("SILU", "GELU", "GELU_TANH"), "their values are keys of ours"),
        Named(f"{FUSED_MOE}.FusedMoEConfig", ("__post_init__",), "where the width of experts is checked"),
        Named(ROUTED_EXPERTS, ("activation", "swiglu_limit"), "a layer that compat declares as a plain module"),
        Named(
            f"{ROUTED_EXPERTS}.weight_loader",
            ("w1", "w2", "w3"),
            "names of projections that our loader is called with",
        ),
        Named(
            f"{WNA16}.create_weights",
            ("weight_packed", "weight_scale", "weight_shape"),
            "parameters that linear layers get and we decompress",
        ),
        Named("vllm.envs", ("VLLM_BATCH_INVARIANT",), "an attribute that the module computes when it is read"),
    ),
    "llmcompressor": (
        Named(LINEAR_EXPERTS, ("_apply_gate", "act_fn"), "our forward pass replaces theirs"),
        Named(WRAP_SAVING, ("_overridden",), "the mark that prevents it from wrapping our method"),
        Named(
            "transformers.core_model_loading.revert_weight_conversion",
            ("_weight_conversions",),
            "the renamings of loading",
        ),
        Named(
            "transformers.Qwen3MoeConfig", ("tie_word_embeddings",), "not a field of the class that all configs share"
        ),
    ),
}

STAND_INS = {
    "vllm": (
        StandIn(f"{OURS}.serving.storage.ExpertStorage.load", f"{ROUTED_EXPERTS}.weight_loader", 2, "of parameters"),
        StandIn(
            f"{OURS}.serving.router.mask_router.select_kept_experts",
            f"{FUSED_MOE}.FusedMoERouter.select_experts",
            0,
            "assigned to a router",
        ),
        StandIn(
            f"{OURS}.serving.router.route_gathered_tokens.select_for_all_ranks",
            f"{FUSED_MOE}.FusedMoERouter.select_experts",
            0,
            "assigned to a router",
        ),
        StandIn(
            f"{OURS}.serving.compat._followed_by.verify_and_update_config",
            "vllm.model_executor.models.config.VerifyAndUpdateConfig.verify_and_update_config",
            0,
            "of a class made at run time",
        ),
        StandIn(
            f"{OURS}.serving.adapters.leave_experts_out.supported_without_experts",
            "vllm.lora.utils.get_supported_lora_modules",
            0,
            "assigned to the module that calls it",
        ),
        StandIn(
            f"{OURS}.serving.adapters.leave_experts_out.check_and_load",
            "vllm.lora.worker_manager.WorkerLoRAManager._load_adapter",
            1,
            "assigned to the class",
        ),
        StandIn(
            f"{OURS}.serving.adapters.check_adapters_of_requests.check_and_validate",
            "vllm.v1.engine.input_processor.InputProcessor._validate_lora",
            1,
            "assigned to the class",
        ),
    ),
    "llmcompressor": (
        StandIn(
            f"{OURS}.modeling.grouped_experts.GroupedExperts.forward",
            f"{LINEAR_EXPERTS}.forward",
            1,
            "assigned to experts",
        ),
    ),
}

# classes of ours that are never instantiated and so may lack abstract methods
NOT_INSTANTIATED = {f"{OURS}.serving.unavailable_config.UnavailableConfig"}

# public methods of our classes that override nothing of theirs
OWN_METHODS = {
    f"{OURS}.modifiers.attribution.AttributionModifier.passes",
    f"{OURS}.modifiers.channel_pruning.ChannelPruningModifier.passes",
    f"{OURS}.modifiers.coverage.CoverageModifier.check_budget",
    *(
        f"{OURS}.modifiers.layerwise_gptq.LayerwiseGPTQModifier.{name}"
        for name in (
            "quantized",
            "changes_others",
            "freeze",
            "join_reconstruction",
            "passes",
            "watched",
            "quantize_others",
            "quantize_experts",
        )
    ),
}

# attributes that the declared class of a value lacks: those of its subclasses, and our own
ELSEWHERE = {
    ("transformers.configuration_utils.PreTrainedConfig", "tie_word_embeddings"),
    ("transformers.configuration_utils.PreTrainedConfig", "attn_implementation"),
    ("llmcompressor.modeling.moe.linear_experts.ExpertMLP", "intermediate_size"),
}
