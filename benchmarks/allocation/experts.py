"""Baselines that no modifier implements: removal of the least used experts, and routers with another top-k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.allocation.recipes import RemovalScope
from moe_coverage_plugin.core.kept_experts import check_kept_experts
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer


def remove_least_used(model: PreTrainedModel, tokens_LE: Tensor, sparsity: float, scope: RemovalScope) -> None:
    """Remove the experts that got the fewest tokens, in place; of equally used experts, the first is removed first.

    Args:
        model: model with linear experts.
        tokens_LE: number of calibration tokens routed to each expert.
        sparsity: fraction of experts to remove; the number of experts is rounded down, as REAP does.
        scope: whether the fraction is of each layer or of the entire model.

    Raises:
        CoverageError: if a layer would keep fewer experts than its router picks.
    """
    # one group for the entire model, or one for each layer
    tokens_PE = tokens_LE.reshape(1, -1) if scope == "model" else tokens_LE
    by_usage_PE = tokens_PE.sort(stable=True).indices
    kept_PE = torch.ones_like(tokens_PE, dtype=torch.bool)
    kept_PE.scatter_(-1, by_usage_PE[:, : int(tokens_PE.shape[-1] * sparsity)], False)
    kept_LE = kept_PE.reshape(tokens_LE.shape)

    layers = find_moe_layers(model)
    check_kept_experts([layer.name for layer in layers], [layer.top_k for layer in layers], kept_LE)
    for layer, kept_E in zip(layers, kept_LE.tolist(), strict=True):
        prune_layer(layer, [torch.arange(width * kept) for width, kept in zip(layer.widths, kept_E, strict=True)])
        mask_router(layer)


def set_top_k(model: PreTrainedModel, count: Callable[[int], int]) -> None:
    """Change the number of experts that routers pick for a token, in place.

    Args:
        model: model with linear experts.
        count: computes the new number from the one the model was trained with.

    Raises:
        CoverageError: if a layer has fewer experts than its router would pick.
    """
    for layer in find_moe_layers(model):
        kept, top_k = sum(width > 0 for width in layer.widths), count(layer.top_k)
        if top_k > kept:
            raise CoverageError(f"{layer.name} has {kept} experts and {top_k} are to be picked: pick at most {kept}")
        # the attribute is in the router or in the module around it, which depends on the model family
        for module in layer.moe.modules():
            if getattr(module, "top_k", None) == layer.top_k:
                module.top_k = top_k  # pyright: ignore[reportArgumentType] - a plain number
    config = model.config.get_text_config()
    config.num_experts_per_tok = count(config.num_experts_per_tok)


def removed(model: PreTrainedModel, original: PreTrainedModel) -> tuple[float, int]:
    """Return the removed fraction of the expert channels, and the number of removed experts."""
    before = [width for layer in find_moe_layers(original) for width in layer.widths]
    after = [width for layer in find_moe_layers(model) for width in layer.widths]
    # REAP renumbers the experts that it keeps, so experts cannot be compared one by one
    return 1 - sum(after) / sum(before), len(before) - sum(width > 0 for width in after)
