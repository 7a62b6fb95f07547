"""What we use of the toolkits and vLLM that our sources do not tell: by name only, or through values without a type.

Imports, calls, overridden methods and attributes of values with a known type are read off the sources, see ``check``.
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
    """A function of ours that is called in the place of theirs, with its first ``given`` parameters given."""

    ours: str
    theirs: str
    given: int
    reason: str


# by the toolkit whose presence tells which half of our package can be checked
NAMED = {
    "vllm": (
        Named(f"{FUSED_MOE}.MoERunner", ("router",), "found by name in the engine's table of layers, of type Any"),
        Named(
            "compressed_tensors.quantization.QuantizationArgs",
            ("type", "num_bits", "strategy", "symmetric", "group_size", "actorder"),
            "inside the dictionaries that vLLM keeps of a scheme",
        ),
        Named(f"{FUSED_MOE}.MoEActivation", ("SILU", "GELU", "GELU_TANH"), "their values are keys of ours"),
        Named(f"{FUSED_MOE}.FusedMoEConfig", ("__post_init__",), "where the width of experts is checked"),
        Named(ROUTED_EXPERTS, ("activation", "swiglu_limit"), "a layer that compat takes as a plain module"),
        Named(
            f"{ROUTED_EXPERTS}.weight_loader", ("w1", "w2", "w3"), "names of projections that our loader is called by"
        ),
        Named(
            f"{WNA16}.create_weights",
            ("weight_packed", "weight_scale", "weight_shape"),
            "parameters that linear layers get and we decompress",
        ),
        Named("vllm.envs", ("VLLM_BATCH_INVARIANT",), "looked up when it is asked for"),
    ),
    "llmcompressor": (
        Named(LINEAR_EXPERTS, ("_apply_gate", "act_fn"), "our forward pass takes the place of theirs"),
        Named(WRAP_SAVING, ("_overridden",), "the mark that keeps it from wrapping our method"),
        Named(
            "transformers.core_model_loading.revert_weight_conversion",
            ("_weight_conversions",),
            "what loading renamed",
        ),
        Named("transformers.Qwen3MoeConfig", ("tie_word_embeddings",), "no field of the class that configs share"),
    ),
}

STAND_INS = {
    "vllm": (
        StandIn(f"{OURS}.serving.storage.ExpertStorage.load", f"{ROUTED_EXPERTS}.weight_loader", 2, "of parameters"),
        StandIn(
            f"{OURS}.serving.router.mask_router.select_living_experts",
            f"{FUSED_MOE}.FusedMoERouter.select_experts",
            0,
            "put on a router",
        ),
        StandIn(
            f"{OURS}.serving.compat._followed_by.verify_and_update_config",
            "vllm.model_executor.models.config.VerifyAndUpdateConfig.verify_and_update_config",
            0,
            "of a class made at run time",
        ),
    ),
    "llmcompressor": (
        StandIn(
            f"{OURS}.calibration.grouped_experts.grouped_experts.forward",
            f"{LINEAR_EXPERTS}.forward",
            0,
            "put on experts",
        ),
    ),
}

# public methods of our classes that override nothing of theirs
OWN_METHODS = {f"{OURS}.modifiers.coverage.CoverageModifier.require_channels"}

# attributes that the class we know a value by lacks: those of its subclasses, and our own
ELSEWHERE = {
    ("transformers.configuration_utils.PreTrainedConfig", "tie_word_embeddings"),
    ("transformers.configuration_utils.PreTrainedConfig", "attn_implementation"),
    ("llmcompressor.modeling.moe.linear_experts.ExpertMLP", "intermediate_size"),
}
