"""Checks that widths leave every router enough experts to pick from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_coverage_plugin.manifest import CoverageError


def check_kept_experts(names: Sequence[str], top_k: Sequence[int], widths_LE: Tensor) -> None:
    """Check that every layer keeps at least as many experts as its router picks for a token.

    Args:
        names: module path of the experts of each layer, for the message.
        top_k: experts that the router of each layer picks.
        widths_LE: kept channels; 0 removes an expert.

    Raises:
        CoverageError: a layer keeps fewer; the message names it.
    """
    kept_L = (widths_LE > 0).sum(-1)
    for name, kept, picked in zip(names, kept_L.tolist(), top_k, strict=True):
        if kept < picked:
            raise CoverageError(
                f"{name} would keep {kept} experts but its router picks {picked} for every token: lower sparsity or "
                'min_width, or give all layers the same budget with inter_layer="uniform"'
            )
