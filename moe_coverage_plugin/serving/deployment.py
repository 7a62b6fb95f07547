"""Engine options that experts of unequal width do not support, refused where the user sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    if not serves_experts(manifest, bool(quantization_config.get("config_groups"))):
        return
    parallel = vllm_config.parallel_config
    refuse_options(parallel.enable_expert_parallel, parallel.enable_eplb, vllm_config.lora_config is not None)
    # Without expert parallelism vLLM shards experts over data-parallel ranks too, and asserts that this divides.
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if manifest.layout == "ragged" and manifest.intermediate_size % ranks:
        raise CoverageError(
            f"{ranks} ranks (tensor times data parallel) do not divide the experts' original width "
            f"{manifest.intermediate_size}: choose a divisor of it"
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
