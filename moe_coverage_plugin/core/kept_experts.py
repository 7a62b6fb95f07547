"""Refusal of widths that leave a router too few experts to pick from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_coverage_plugin.manifest import CoverageError


def check_kept_experts(names: Sequence[str], top_k: Sequence[int], widths_LE: Tensor) -> None:
    """Refuse a layer that keeps fewer experts than its router picks for every token.

    Args:
        names: module path of the experts of each layer, for the message.
        top_k: experts that the router of each layer picks.
        widths_LE: kept channels; 0 removes an expert.

    Raises:
        CoverageError: as said, naming the layer.
    """
    live_L = (widths_LE > 0).sum(-1)
    for name, live, picked in zip(names, live_L.tolist(), top_k, strict=True):
        if live < picked:
            raise CoverageError(
                f"{name} would keep {live} experts but its router picks {picked} for every token: lower sparsity or "
                'min_width, or give all layers the same budget with inter_layer="uniform"'
            )
