"""Checks engine options in the user's process: errors of other processes reach the user without their message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.adapters import check_adapters_of_requests, check_lora_options
from moe_coverage_plugin.serving.degrees import check_degrees
from moe_coverage_plugin.serving.local_files import read_local
from moe_coverage_plugin.serving.parallel_options import check_parallel, check_stock_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, OffloadConfig, ParallelConfig, VllmConfig

# of the method
NO_DRAFT = (
    "speculative_config has method {!r}, but a pruned checkpoint holds no layer that predicts several tokens, because "
    "llm-compressor does not load such layers: serve without speculative_config, or with method 'ngram'"
)


def serves_experts(manifest: Manifest, quantized: bool) -> bool:
    """Return whether our method computes the experts of a checkpoint, because stock kernels cannot.

    Args:
        manifest: of the checkpoint.
        quantized: whether any weights of the checkpoint are quantized.
    """
    return manifest.layout == "ragged" or (quantized and compat.lacks_w4a16_moe())


def check_deployment(vllm_config: VllmConfig) -> None:
    """Check a complete engine configuration before any process starts: the model, and a draft model beside it.

    Raises:
        CoverageError: the experts of a checkpoint cannot be served with these options.
    """
    check_model(vllm_config, vllm_config.model_config, vllm_config.parallel_config)
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    # without a model of its own, a method has the model's configuration as its draft's
    if speculative is None or draft is None or draft.model == vllm_config.model_config.model:
        return
    try:
        check_model(vllm_config, draft, speculative.draft_parallel_config)
    except CoverageError as error:
        raise CoverageError(f"the draft model {draft.model} cannot be served: {error}") from error


def check_model(vllm_config: VllmConfig, model_config: ModelConfig, parallel: ParallelConfig) -> None:
    """Check one model of an engine.

    Args:
        vllm_config: of the engine.
        model_config: of the model.
        parallel: the ranks of the model.

    Raises:
        CoverageError: the experts of the checkpoint cannot be served with these options.
    """
    quantization_config: dict[str, Any] = model_config.model_arch_config.quantization_config or {}
    manifest = Manifest.from_quantization_config(quantization_config)
    expert_parallel = parallel.enable_expert_parallel
    ranks_of_experts = parallel.tensor_parallel_size * parallel.data_parallel_size
    # in 16 bits and one width, the entry is at the top level, and vLLM asks no quantization config
    if getattr(model_config.hf_config, CONFIG_KEY, None) is not None:
        check_stock_experts(expert_parallel, ranks_of_experts)
    if manifest is None or model_config.quantization != CONFIG_KEY:
        return
    check_positions(model_config.hf_text_config)
    groups = quantization_config.get("config_groups") or {}
    check_int8_products(groups.values())
    ours = serves_experts(manifest, bool(groups))
    check_degrees(
        manifest,
        quantization_config,
        read_local(model_config.model),
        ranks=parallel.tensor_parallel_size,
        # vLLM shards experts over data-parallel ranks too, unless it assigns entire experts to ranks
        expert_ranks=1 if expert_parallel else ranks_of_experts,
        any_expert_ranks=ours,
    )
    if not ours:
        check_stock_experts(expert_parallel, ranks_of_experts)
        return
    check_parallel(parallel)
    check_features(vllm_config, model_config, manifest)
    if model_config is not vllm_config.model_config:
        return
    # of the model alone: the draft has the same loader, whose options stock models may not take, and no adapters.
    # Not for stock methods, whose experts have parameters that no checkpoint fills
    compat.require_all_weights(vllm_config)
    if vllm_config.lora_config is not None:
        check_lora_options(vllm_config.lora_config)
        check_adapters_of_requests(vllm_config.lora_config)


def check_features(vllm_config: VllmConfig, model_config: ModelConfig, manifest: Manifest) -> None:
    """Check options that would silently have no effect, or would stop later with an error about something else.

    Args:
        vllm_config: of the engine.
        model_config: of one of its models.
        manifest: of this model's checkpoint.

    Raises:
        CoverageError: an option is not supported.
    """
    if compat.wants_batch_invariance():
        raise CoverageError(
            "VLLM_BATCH_INVARIANT is set, but experts of unequal width are summed in an order that depends on the "
            "number of tokens in a batch: serve without it"
        )
    if offloads(vllm_config.offload_config, manifest):
        raise CoverageError(
            "weights are to be offloaded (cpu_offload_gb, offload_group_size), but experts of unequal width stay on "
            "the card: serve without offloading on more cards, by --tensor-parallel-size, or name other parameters "
            "in cpu_offload_params or offload_params"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and "mtp" in str(speculative.method):
        raise CoverageError(NO_DRAFT.format(speculative.method))
    if model_config.using_transformers_backend() and manifest.removed_experts:
        raise CoverageError(
            "the model is run by transformers (model_impl), whose routers may still choose experts that were removed: "
            "serve it with vLLM's own class, or prune again with layout='padded', which removes none"
        )


def offloads(offload_config: OffloadConfig, manifest: Manifest) -> bool:
    """Return whether an engine is configured to keep parameters of experts on the host."""
    uva, prefetch = offload_config.uva, offload_config.prefetch
    chosen = [uva.cpu_offload_params] if uva.cpu_offload_gb > 0 else []
    chosen += [prefetch.offload_params] if prefetch.offload_group_size > 0 else []
    of_experts = {part for name in manifest.widths for part in name.split(".")}
    return any(
        not names or any(part in of_experts or part[:2] in ("w1", "w2") for name in names for part in name.split("."))
        for names in chosen
    )


def check_positions(text_config: PretrainedConfig) -> None:
    """Check that this build of vLLM rotates queries correctly; some builds do not, without an error.

    Raises:
        CoverageError: the model has positions that this build computes wrongly, pruned or not.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") != "default"
    if getattr(text_config, "kv_lora_rank", None) and not scaled and compat.misrotates_heads():
        raise CoverageError(
            "the model has multi-head latent attention with rope_type 'default', whose queries this build of vLLM "
            "rotates wrongly (all models of this kind, pruned or not): serve it on a GPU"
        )


def check_int8_products(groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that this build of vLLM multiplies 8-bit integers correctly; some builds do not, without an error.

    Args:
        groups: ``config_groups`` of a checkpoint.

    Raises:
        CoverageError: weights and activations of a group are 8-bit integers, and the build's products overflow.
    """
    for group in groups:
        operands = [group.get(name) or {} for name in ("weights", "input_activations")]
        int8 = all((args.get("type"), args.get("num_bits")) == ("int", 8) for args in operands)
        if int8 and compat.saturates_int8_products():
            raise CoverageError(
                f"{', '.join(group['targets'])} have int8 weights and activations, whose products overflow in this "
                "build of vLLM on this processor (all models of this kind, pruned or not): serve it on a GPU or a "
                "processor with VNNI, or quantize with FP8_DYNAMIC or W4A16"
            )
