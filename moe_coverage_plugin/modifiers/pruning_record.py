"""What a checkpoint of a pruned model contains beside its weights: figures, scores, pictures and provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.provenance import environment
from moe_coverage_plugin.checkpoint.origin import read_origin
from moe_coverage_plugin.checkpoint.saving import PruningRecord
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import save_scores
from moe_coverage_plugin.manifest import PICTURES_NAME, SCORES_NAME, Layout
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.oneshot_run import running_oneshot
from moe_coverage_plugin.modifiers.plan import WidthPlan
from moe_coverage_plugin.report.stored_weights import read_stored_weights
from moe_coverage_plugin.report.summary import summarize
from moe_coverage_plugin.report.view import PlanView


def pruning_record(
    attribution: AttributionModifier,
    plan: WidthPlan,
    widths_LE: Tensor,
    recipe: list[dict[str, Any]],
    layout: Layout,
    block_size: int,
    pictures: bool,
    source: str,
    bytes_before: int,
) -> PruningRecord:
    """Collect what the checkpoint will contain beside its weights.

    Args:
        attribution: the modifier that measured the scores.
        plan: the plan that was carried out.
        widths_LE: channels of every expert as the layout stores them, int64.
        recipe: names and fields of our modifiers in the recipe.
        layout: how experts are stored.
        block_size: channels that all widths of the checkpoint are multiples of.
        pictures: whether to draw the plan.
        source: path or name that the model was opened from.
        bytes_before: bytes of all weights before pruning.
    """
    measured_on = attribution.provenance
    origin = read_origin(source)
    view = _view(plan, widths_LE, measured_on | {"recipe": recipe}, origin.name)
    # functions of modules, so that pickle takes them
    companions: list[Callable[[Path], None]] = [partial(_save_scores, plan.scores, measured_on)]
    if (save_tokenizer := _tokenizer_of_run()) is not None:
        companions.append(save_tokenizer)
    if pictures:
        companions.append(partial(_draw, view))
    return PruningRecord(
        layout=layout,
        intermediate_size=view.intermediate_size,
        block_size=block_size,
        provenance=measured_on | environment() | {"recipe": recipe},
        report=_report(plan, view) | {"weight_bytes_before": bytes_before},
        companions=companions,
        origin=origin,
        # scores may be a user's own
        tokens=dict(zip(plan.scores.names, plan.scores.tokens_LE.clamp(min=0).tolist(), strict=True)),
    )


def _tokenizer_of_run() -> Callable[[Path], None] | None:
    run = running_oneshot()
    processor: Any = run.processor if run is not None else None
    return None if processor is None else partial(_save_tokenizer, processor)


def _save_tokenizer(processor: Any, directory: Path) -> None:
    processor.save_pretrained(directory)


def _save_scores(scores: AttributionScores, measured_on: dict[str, Any], directory: Path) -> None:
    save_scores(directory / SCORES_NAME, scores, measured_on)


def _view(plan: WidthPlan, widths_LE: Tensor, provenance: dict[str, Any], model: str) -> PlanView:
    scores = plan.scores
    known = summarize(provenance, scores)
    summary = replace(known, model=model or known.model, recipe=_recipe_of_run() or known.recipe)
    share = 1 - int(widths_LE.sum()) / scores.channels_LEI.numel()
    removed = f"{100 * share:.1f} % of the expert channels removed"
    return PlanView(
        names=scores.names,
        intermediate_size=scores.channels_LEI.shape[-1],
        widths_LE=widths_LE,
        channels_LEI=scores.channels_LEI,
        expert_prior_LE=torch.tensor(plan.notes["prior_LE"], dtype=torch.float64),
        layer_loss_L=scores.layer_loss_L,
        layer_prior_L=torch.tensor(plan.notes["layer_prior_L"], dtype=torch.float64),
        tokens_LE=scores.tokens_LE,
        title=f"{summary.model}, {removed}" if summary.model else removed,
        summary=summary,
        facts={
            "model": str(provenance.get("model")),
            "channel scores": scores.channel_metric,
            "widths are multiples of": str(plan.block_size),
            "calibration sha256": str(provenance.get("calibration_sha256")),
        },
    )


def _recipe_of_run() -> str:
    """Name of the recipe file of the ``oneshot`` run; empty if the recipe is not a file."""
    run = running_oneshot()
    recipe: Any = run.recipe if run is not None else None
    return Path(recipe).stem if isinstance(recipe, str) and recipe.endswith((".yaml", ".yml")) else ""


def _draw(view: PlanView, directory: Path) -> None:
    """Write the report into a directory that has the weights."""
    # here, because matplotlib takes a second to import and a run without pictures does not need it
    from moe_coverage_plugin.report.page import write_report

    summary = replace(view.summary, weights=read_stored_weights(directory))
    write_report(replace(view, summary=summary), directory / PICTURES_NAME)


def _report(plan: WidthPlan, view: PlanView) -> dict[str, Any]:
    """Figures of a pruning, by layer, for the report file."""
    assert view.coverage_L is not None, "channels were scored"
    layers = {
        name: {
            "widths": view.widths_LE[layer].tolist(),
            "tokens": plan.scores.tokens_LE[layer].tolist(),
            "coverage": float(view.coverage_L[layer]),
        }
        for layer, name in enumerate(plan.scores.names)
    }
    kept_for_layout = int(((plan.widths_LE == 0) & (view.widths_LE > 0)).sum())
    return {
        "layers": layers,
        "experts_without_tokens": plan.scores.unreached,
        "experts_kept_for_layout": kept_for_layout,
        "plan": plan.notes,
    }
