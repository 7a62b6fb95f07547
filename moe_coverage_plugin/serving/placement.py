"""Places the experts that our method computes on the ranks of expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.logger import init_logger

from moe_coverage_plugin.expert_placement import contiguous, layer_loads, place_experts, size_ratio, work_ratio
from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import Manifest

# vLLM configures the loggers below its own name
logger = init_logger(f"vllm.{__name__}")


def experts_of_ranks(manifest: Manifest, schemes: Mapping[str, ExpertScheme], ranks: int) -> dict[str, list[int]]:
    """Return the rank that holds each expert, by module path of a layer's experts.

    Every rank and ``moe-coverage inspect`` compute the same placement. It is logged, because vLLM logs its own.

    Args:
        manifest: of the checkpoint.
        schemes: how the experts that our method computes are stored, by module path.
        ranks: number of expert-parallel ranks.
    """
    loads = layer_loads(manifest, {name: scheme.bits for name, scheme in schemes.items()})
    layers = list(loads.values())
    placement, by_number = place_experts(layers, ranks), [contiguous(len(layer.size_E), ranks) for layer in layers]
    logger.info(
        "Experts of unequal width are placed on %d ranks by widths%s: the fullest rank holds %.3f times the memory of "
        "the mean rank (%.3f by vLLM's placement), the busiest ones have %.3f times its work (%.3f)",
        ranks,
        " and calibration tokens" if manifest.tokens else "",
        *(ratio(layers, each, ranks) for ratio in (size_ratio, work_ratio) for each in (placement, by_number)),
    )
    return dict(zip(loads, placement, strict=True))
