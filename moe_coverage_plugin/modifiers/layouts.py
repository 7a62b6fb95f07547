"""Whether a layout can store the experts of a model."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import shared_experts_follow
from moe_coverage_plugin.modifiers.coverage import CoverageModifier


def check_layout(layout: Layout, coverage: CoverageModifier, model: PreTrainedModel) -> None:
    """Check that a layout can store the experts of a model.

    Args:
        layout: how experts will be stored.
        coverage: the budget and the pruned layers.
        model: the model to prune.

    Raises:
        CoverageError: layers are left unpruned, or shared experts have the same width.
    """
    if layout == "ragged":
        return
    if ignore := coverage.attribution.ignore:
        raise CoverageError(
            f"layout={layout!r} stores one width for the whole model, but ignore={ignore} leaves layers at theirs: "
            "empty ignore, or use layout='ragged'"
        )
    if layout == "uniform" and shared_experts_follow(model):
        raise CoverageError(
            f"layout='uniform' changes the width from which {type(model).__name__} also takes the size of its shared "
            "experts, so no stock engine could load it: use layout='ragged' or 'padded'"
        )


def padded_width(layout: Layout, widths_LE: Tensor, coverage: CoverageModifier, model: PreTrainedModel) -> int | None:
    """Return the width that experts are padded to with zeros, ``None`` if they are not padded."""
    if layout != "padded":
        return None
    # an engine takes the size of shared experts from the same number, so it must not change
    return coverage.attribution.intermediate_size if shared_experts_follow(model) else int(widths_LE.max())
