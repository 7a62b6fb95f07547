"""Widths of experts as a layout stores them."""

from __future__ import annotations

import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import shared_experts_follow
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.plan import WidthPlan


def check_layout(layout: Layout, coverage: CoverageModifier, block_size: int, model: PreTrainedModel) -> None:
    """Check that a layout can store the experts of a model.

    Args:
        layout: how experts will be stored.
        coverage: the budget and the pruned layers.
        block_size: channels that every width will be a multiple of.
        model: the model to prune.

    Raises:
        CoverageError: layers are left unpruned, shared experts have the same width, or the budget is below one block
            per expert.
    """
    if layout == "ragged":
        return
    if ignore := coverage.attribution.ignore:
        raise CoverageError(
            f"layout={layout!r} stores one width for the whole model, but ignore={ignore} leaves layers at theirs: "
            "empty ignore, or use layout='ragged'"
        )
    if layout == "padded":
        return
    if shared_experts_follow(model):
        raise CoverageError(
            f"layout='uniform' changes the width from which {type(model).__name__} also takes the size of its shared "
            "experts, so no stock engine could load it: use layout='ragged' or 'padded'"
        )
    if uniform_width(coverage, block_size) == 0:
        raise CoverageError(
            f"layout='uniform' with sparsity={coverage.sparsity} would give every expert less than one block of "
            f"{block_size} channels: lower sparsity or block_size"
        )


def uniform_width(coverage: CoverageModifier, block_size: int) -> int:
    """Return the channels that the budget leaves every expert, in multiples of the block size."""
    experts = coverage.total_channels // coverage.attribution.intermediate_size
    average = coverage.budget // experts
    return average - average % block_size


def stored_widths(layout: Layout, plan: WidthPlan, coverage: CoverageModifier, block_size: int) -> Tensor:
    """Return the kept channels ``[L, E]`` of every expert as the layout can store them, int64."""
    if layout == "ragged":
        return plan.widths_LE
    if layout == "padded":
        widths_LE = plan.widths_LE.clamp(min=plan.block_size)
    else:
        widths_LE = torch.full_like(plan.widths_LE, uniform_width(coverage, block_size))
    if kept_for_layout := int((plan.widths_LE == 0).sum()):
        logger.warning(
            f"layout={layout!r} cannot remove experts: {kept_for_layout} keep {int(widths_LE.min())} channels "
            "instead of none"
        )
    return widths_LE


def padded_width(layout: Layout, widths_LE: Tensor, coverage: CoverageModifier, model: PreTrainedModel) -> int | None:
    """Return the width that experts are padded to with zeros, ``None`` if they are not padded."""
    if layout != "padded":
        return None
    # an engine takes the size of shared experts from the same number, so it must not change
    return coverage.attribution.intermediate_size if shared_experts_follow(model) else int(widths_LE.max())
