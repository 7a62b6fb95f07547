"""Collects the contents of a checkpoint's pictures: widths, and the scores and the report beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_coverage_plugin.cli.checkpoint import Checkpoint
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import find_scores, load_scores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report.stored_weights import read_stored_weights
from moe_coverage_plugin.report.summary import summarize
from moe_coverage_plugin.report.view import PlanView


def checkpoint_view(checkpoint: Checkpoint, facts: dict[str, str]) -> PlanView:
    """Return a view of the measured layers, or of all layers if there are no scores and no report.

    Args:
        checkpoint: the checkpoint.
        facts: text for the page, by label.

    Raises:
        CoverageError: damaged scores, scores of another model, or layers with different numbers of experts.
    """
    scores = _scores(checkpoint)
    names = scores.names if scores is not None else list(checkpoint.report) or list(checkpoint.manifest.widths)
    widths = [checkpoint.manifest.widths[name] for name in names]
    if len({len(widths_E) for widths_E in widths}) > 1:
        raise CoverageError(
            "layers have different numbers of experts, which pictures cannot show: leave --pictures out"
        )
    layers, experts = len(names), len(widths[0])
    tokens = [checkpoint.report[name]["tokens"] for name in names if name in checkpoint.report]
    return PlanView(
        names=names,
        intermediate_size=checkpoint.manifest.intermediate_size,
        widths_LE=torch.tensor(widths),
        channels_LEI=None if scores is None else scores.channels_LEI,
        expert_prior_LE=_noted(checkpoint.plan.get("prior_LE"), (layers, experts)),
        layer_loss_L=_noted(checkpoint.plan.get("layer_loss_L"), (layers,)),
        layer_prior_L=_noted(checkpoint.plan.get("layer_prior_L"), (layers,)),
        tokens_LE=torch.tensor(tokens) if len(tokens) == layers else None,
        title=checkpoint.directory.resolve().name,
        summary=summarize(checkpoint.manifest.provenance, scores, read_stored_weights(checkpoint.directory)),
        facts=facts,
    )


def _scores(checkpoint: Checkpoint) -> AttributionScores | None:
    path = find_scores(checkpoint.directory)
    if path is None:
        return None
    scores, _ = load_scores(path)
    shape = scores.channels_LEI.shape[1:]
    found = {
        (len(checkpoint.manifest.widths.get(name, ())), checkpoint.manifest.intermediate_size) for name in scores.names
    }
    if found != {tuple(shape)}:
        raise CoverageError(
            f"{path} has scores of other experts than {checkpoint.directory}: delete it, or copy the right file"
        )
    return scores


def _noted(values: Any, shape: Sequence[int]) -> Tensor | None:
    """Return values of the report as a tensor, if they have this shape."""
    try:
        tensor = torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor if tensor.shape == tuple(shape) else None
