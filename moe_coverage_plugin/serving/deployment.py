"""Engine options that experts of unequal width do not support, refused where the user sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.degrees import check_degrees

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import OffloadConfig, VllmConfig

GATHERING_BACKEND = "allgather_reducescatter"
"""vLLM's default way to exchange tokens of data-parallel ranks, the only one that works without expert parallelism."""


def serves_experts(manifest: Manifest, quantized: bool) -> bool:
    """Whether our method takes the experts of a checkpoint, where stock kernels cannot."""
    return manifest.layout == "ragged" or (quantized and compat.lacks_w4a16_moe())


def check_deployment(vllm_config: VllmConfig) -> None:
    """Look at a whole engine configuration before any process starts.

    Raises:
        CoverageError: for options under which our experts cannot be served.
    """
    model_config = vllm_config.model_config
    quantization_config: dict[str, Any] = model_config.model_arch_config.quantization_config or {}
    manifest = Manifest.from_quantization_config(quantization_config)
    if manifest is None or model_config.quantization != CONFIG_KEY:
        return
    refuse_wrong_positions(model_config.hf_text_config)
    groups = quantization_config.get("config_groups") or {}
    refuse_wrong_products(groups.values())
    parallel = vllm_config.parallel_config
    ours = serves_experts(manifest, bool(groups))
    check_degrees(
        Path(model_config.model),
        manifest,
        {size for group in groups.values() if (size := (group.get("weights") or {}).get("group_size"))},
        ranks=parallel.tensor_parallel_size,
        # vLLM shards experts over data-parallel ranks too, unless it deals them out whole
        expert_ranks=1
        if parallel.enable_expert_parallel
        else parallel.tensor_parallel_size * parallel.data_parallel_size,
        expert_groups_may_part=ours,
    )
    if not ours:
        return
    # stock methods for experts make parameters that no checkpoint fills
    compat.require_all_weights(vllm_config)
    refuse_options(parallel.enable_expert_parallel, parallel.enable_eplb, vllm_config.lora_config is not None)
    refuse_unkept(vllm_config, manifest)
    if parallel.data_parallel_size > 1:
        refuse_exchanges(parallel.data_parallel_size, parallel.all2all_backend)


def refuse_unkept(vllm_config: VllmConfig, manifest: Manifest) -> None:
    """Refuse what would be accepted without a word and then not hold, or stop in words about something else.

    Raises:
        CoverageError: naming the option and what to do without it.
    """
    if compat.wants_batch_invariance():
        raise CoverageError(
            "VLLM_BATCH_INVARIANT is set, but experts of unequal width are summed in an order that follows the number "
            "of tokens in a batch: serve without it"
        )
    if offloads(vllm_config.offload_config, manifest):
        raise CoverageError(
            "weights are to be offloaded (cpu_offload_gb, offload_group_size), but experts of unequal width stay on "
            "the card: serve without, over more cards by --tensor-parallel-size, or name other parameters in "
            "cpu_offload_params or offload_params"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and "mtp" in str(speculative.method):
        raise CoverageError(
            f"speculative_config has method {speculative.method!r}, but a pruned checkpoint holds no layer that "
            "predicts several tokens, which the toolkit never loads: serve without, or with method 'ngram'"
        )
    if vllm_config.model_config.using_transformers_backend() and manifest.removed_experts:
        raise CoverageError(
            "the model runs by transformers (model_impl), whose routers may still choose experts that were removed: "
            "serve it by vLLM's own class, or prune with min_width in place of removing experts"
        )


def offloads(offload_config: OffloadConfig, manifest: Manifest) -> bool:
    """Whether an engine is to keep parameters of experts on the host."""
    uva, prefetch = offload_config.uva, offload_config.prefetch
    chosen = [uva.cpu_offload_params] if uva.cpu_offload_gb > 0 else []
    chosen += [prefetch.offload_params] if prefetch.offload_group_size > 0 else []
    of_experts = {part for name in manifest.widths for part in name.split(".")}
    return any(
        not names or any(part in of_experts or part[:2] in ("w1", "w2") for name in names for part in name.split("."))
        for names in chosen
    )


def refuse_wrong_positions(text_config: PretrainedConfig) -> None:
    """Refuse models that a build of vLLM answers wrongly without a word, pruned or not.

    Raises:
        CoverageError: naming what the build computes wrongly.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") != "default"
    if getattr(text_config, "kv_lora_rank", None) and not scaled and compat.misrotates_heads():
        raise CoverageError(
            "the model has multi-head latent attention with rope_type 'default', whose queries this build of vLLM "
            "rotates wrongly (all models of this kind, pruned or not): serve it on a GPU"
        )


def refuse_wrong_products(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse 8-bit integers that a build multiplies wrongly without a word, pruned or not.

    Args:
        groups: ``config_groups`` of a checkpoint.

    Raises:
        CoverageError: if weights and activations of a group are 8-bit integers.
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


def refuse_exchanges(ranks: int, backend: str) -> None:
    """Refuse what cannot bring all tokens of data-parallel ranks to every rank's part of each expert.

    Raises:
        CoverageError: naming the number of ranks or the backend, and what to use in its place.
    """
    if backend != GATHERING_BACKEND:
        raise CoverageError(
            f"all2all_backend is {backend!r}, which sends tokens to whole experts, but data-parallel ranks hold parts "
            "of every expert of unequal width: serve without --all2all-backend"
        )
    if compat.lacks_data_parallel_moe():
        raise CoverageError(
            f"data_parallel_size is {ranks}, but this build of vLLM cannot gather the tokens of its ranks for experts "
            "(all_gatherv): serve with --tensor-parallel-size, or start engines that share nothing"
        )


def refuse_options(expert_parallel: bool, expert_balancing: bool, lora: bool) -> None:
    """Refuse what moves whole experts between ranks or adds weights to them.

    Raises:
        CoverageError: naming the option and what to use in its place.
    """
    if expert_balancing:
        raise CoverageError(
            "enable_eplb is set, but experts of unequal width cannot change places: serve without --enable-eplb"
        )
    if expert_parallel:
        raise CoverageError(
            "enable_expert_parallel is set, but experts of unequal width are sharded within each expert: serve "
            "without --enable-expert-parallel, with --tensor-parallel-size"
        )
    if lora:
        raise CoverageError(
            "enable_lora is set, but adapters have one width for all experts of a layer: merge the adapter into the "
            "model before pruning and serve without --enable-lora"
        )
