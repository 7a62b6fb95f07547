"""Checks engine options in the user's process: errors of other processes reach the user without their message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.adapters import check_adapters_of_requests, check_lora_options
from moe_coverage_plugin.serving.degrees import check_degrees
from moe_coverage_plugin.serving.local_files import read_local

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import OffloadConfig, VllmConfig

GATHERING_BACKEND = "allgather_reducescatter"
"""vLLM's default backend for data-parallel ranks, the only one that works without expert parallelism."""

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
    """Check a complete engine configuration before any process starts.

    Raises:
        CoverageError: the experts of the checkpoint cannot be served with these options.
    """
    model_config = vllm_config.model_config
    quantization_config: dict[str, Any] = model_config.model_arch_config.quantization_config or {}
    manifest = Manifest.from_quantization_config(quantization_config)
    if manifest is None or model_config.quantization != CONFIG_KEY:
        return
    check_positions(model_config.hf_text_config)
    groups = quantization_config.get("config_groups") or {}
    check_int8_products(groups.values())
    parallel = vllm_config.parallel_config
    ours = serves_experts(manifest, bool(groups))
    check_degrees(
        manifest,
        quantization_config,
        read_local(model_config.model),
        ranks=parallel.tensor_parallel_size,
        # vLLM shards experts over data-parallel ranks too, unless it assigns entire experts to ranks
        expert_ranks=1
        if parallel.enable_expert_parallel
        else parallel.tensor_parallel_size * parallel.data_parallel_size,
        any_expert_ranks=ours,
    )
    if not ours:
        return
    # not for stock methods, whose experts have parameters that no checkpoint fills
    compat.require_all_weights(vllm_config)
    check_options(parallel.enable_expert_parallel, parallel.enable_eplb)
    if vllm_config.lora_config is not None:
        check_lora_options(vllm_config.lora_config)
        check_adapters_of_requests(vllm_config.lora_config)
    check_features(vllm_config, manifest)
    if parallel.data_parallel_size > 1:
        check_data_parallel(parallel.data_parallel_size, parallel.all2all_backend)


def check_features(vllm_config: VllmConfig, manifest: Manifest) -> None:
    """Check options that would silently have no effect, or would stop later with an error about something else.

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
    if vllm_config.model_config.using_transformers_backend() and manifest.removed_experts:
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


def check_data_parallel(ranks: int, backend: str) -> None:
    """Check that the tokens of all data-parallel ranks reach every rank, each of which holds a part of every expert.

    Args:
        ranks: number of data-parallel ranks.
        backend: name of vLLM's all-to-all backend.

    Raises:
        CoverageError: the backend or this build of vLLM does not send all tokens to all ranks.
    """
    if backend != GATHERING_BACKEND:
        raise CoverageError(
            f"all2all_backend is {backend!r}, which sends tokens to the ranks of their experts, but every "
            "data-parallel rank holds a part of each expert of unequal width: serve without --all2all-backend"
        )
    if compat.lacks_data_parallel_moe():
        raise CoverageError(
            f"data_parallel_size is {ranks}, but this build of vLLM cannot gather the tokens of its ranks for experts "
            "(all_gatherv): serve with --tensor-parallel-size, or start independent engines"
        )


def check_options(expert_parallel: bool, expert_balancing: bool) -> None:
    """Check options that move entire experts between ranks.

    Args:
        expert_parallel: ``enable_expert_parallel``.
        expert_balancing: ``enable_eplb``.

    Raises:
        CoverageError: one of them is switched on.
    """
    if expert_balancing:
        raise CoverageError(
            "enable_eplb is set, but experts of unequal width cannot move between ranks: serve without --enable-eplb"
        )
    if expert_parallel:
        raise CoverageError(
            "enable_expert_parallel is set, but experts of unequal width are sharded within each expert: serve "
            "without --enable-expert-parallel, with --tensor-parallel-size"
        )
