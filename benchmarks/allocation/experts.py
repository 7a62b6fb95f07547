"""What no modifier does: whole experts dropped by usage, and routers that pick another number of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.allocation.recipes import DropScope
from moe_coverage_plugin.core.kept_experts import check_kept_experts
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer


def drop_least_used(model: PreTrainedModel, tokens_LE: Tensor, sparsity: float, scope: DropScope) -> None:
    """Remove the experts that the fewest tokens were routed to, in place; equal ones in the order of the expert.

    Args:
        tokens_LE: routed calibration tokens.
        sparsity: fraction of the experts of every layer, or of the model, rounded down as REAP does.

    Raises:
        CoverageError: a router would have fewer experts than it picks.
    """
    # one problem for the model, or one for each layer
    tokens_PE = tokens_LE.reshape(1, -1) if scope == "model" else tokens_LE
    by_usage_PE = tokens_PE.sort(stable=True).indices
    kept_PE = torch.ones_like(tokens_PE, dtype=torch.bool)
    kept_PE.scatter_(-1, by_usage_PE[:, : int(tokens_PE.shape[-1] * sparsity)], False)
    kept_LE = kept_PE.reshape(tokens_LE.shape)

    blocks = find_moe_layers(model)
    check_kept_experts([block.name for block in blocks], [block.top_k for block in blocks], kept_LE)
    for block, kept_E in zip(blocks, kept_LE.tolist(), strict=True):
        prune_layer(block, [torch.arange(width * kept) for width, kept in zip(block.widths, kept_E, strict=True)])
        mask_router(block)


def pick(model: PreTrainedModel, count: Callable[[int], int]) -> None:
    """Let every router pick another number of experts, in place.

    Args:
        count: that number, from the one the model was trained with.

    Raises:
        CoverageError: a layer has fewer experts.
    """
    for block in find_moe_layers(model):
        live, top_k = sum(width > 0 for width in block.widths), count(block.top_k)
        if top_k > live:
            raise CoverageError(f"{block.name} has {live} experts and {top_k} are to be picked: pick at most {live}")
        # families keep the number at the router or at the module around it
        for module in block.moe.modules():
            if getattr(module, "top_k", None) == block.top_k:
                module.top_k = top_k  # pyright: ignore[reportArgumentType] - a plain number
    config = model.config.get_text_config()
    config.num_experts_per_tok = count(config.num_experts_per_tok)


def removed(model: PreTrainedModel, original: PreTrainedModel) -> tuple[float, int]:
    """Fraction of the expert channels that is gone, and how many experts are gone whole."""
    before = [width for block in find_moe_layers(original) for width in block.widths]
    after = [width for block in find_moe_layers(model) for width in block.widths]
    # REAP renumbers experts, so only what is left can be counted
    return 1 - sum(after) / sum(before), len(before) - sum(width > 0 for width in after)
