"""How evenly expert parallelism in vLLM shares a checkpoint among ranks, for ``moe-coverage inspect``."""

from __future__ import annotations

from typing import Any

from moe_coverage_plugin.cli.checkpoint import Checkpoint
from moe_coverage_plugin.expert_placement import (
    LayerLoads,
    contiguous,
    layer_loads,
    place_experts,
    size_ratio,
    work_ratio,
)
from moe_coverage_plugin.files.expert_tensors import find_experts, names_of
from moe_coverage_plugin.files.storage import PACKED

HEADERS = ("expert-parallel ranks", "bytes max/mean", "by number", "work max/mean", "by number")
SHOWN_RANKS = (2, 4, 8)


def rank_balance(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the load of the fullest rank divided by that of the mean rank, by number of ranks.

    ``bytes`` are those of stored experts over all layers. ``work`` is width times calibration tokens of the busiest
    rank of each layer, summed over layers; ``None`` if the checkpoint lacks the tokens of a layer. ``bytes_by_number``
    and ``work_by_number`` are of vLLM's own placement, which assigns equal numbers of experts in their order.

    Empty for experts of one width, which vLLM places itself.
    """
    manifest = checkpoint.manifest
    if manifest.layout != "ragged":
        return {}
    stored = _stored_experts(checkpoint)
    layers = layer_loads(manifest, {name: _bits(checkpoint, experts) for name, experts in stored.items()})
    planned = list(layers.values())
    measured = [
        LayerLoads(tuple(_bytes(checkpoint, names) for names in stored[name]), layer.work_E)
        for name, layer in layers.items()
    ]
    tokens_known = manifest.tokens.keys() == manifest.widths.keys()
    balance = {}
    for ranks in (ranks for ranks in SHOWN_RANKS if ranks <= max(map(len, manifest.widths.values()))):
        by_number = [contiguous(len(layer.size_E), ranks) for layer in planned]
        placements = ("", place_experts(planned, ranks)), ("_by_number", by_number)
        balance[str(ranks)] = {
            f"{name}{suffix}": ratio(measured, placement, ranks) if known else None
            for name, ratio, known in (("bytes", size_ratio, True), ("work", work_ratio, tokens_known))
            for suffix, placement in placements
        }
    return balance


def balance_rows(balance: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table with the columns of ``HEADERS``."""
    return [
        (ranks, *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios.values()))
        for ranks, ratios in balance.items()
    ]


def _stored_experts(checkpoint: Checkpoint) -> dict[str, list[set[str]]]:
    """Return the names of the tensors of every expert, by layer."""
    experts = find_experts(checkpoint.tensors, checkpoint.manifest)
    return {
        layer: [names_of({(layer, expert): experts.get((layer, expert), {})}) for expert in range(len(widths))]
        for layer, widths in checkpoint.manifest.widths.items()
    }


def _bits(checkpoint: Checkpoint, experts: list[set[str]]) -> int:
    """Return the bits of a weight in a layer; 16 for all that are not quantized, as in :class:`ExpertScheme`."""
    names = set().union(*experts)
    if any(name.endswith(PACKED) for name in names):
        return 4
    return 8 if any(checkpoint.tensors[name].dtype.startswith("F8") for name in names) else 16


def _bytes(checkpoint: Checkpoint, names: set[str]) -> int:
    return sum(checkpoint.tensors[name].bytes for name in names if not name.endswith("_shape"))
