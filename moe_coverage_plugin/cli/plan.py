"""``moe-coverage plan``: widths from a score file, and what they would keep."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_coverage_plugin.cli import output
from moe_coverage_plugin.core.alignment import Alignment, align
from moe_coverage_plugin.core.allocation import channel_budget
from moe_coverage_plugin.core.feasibility import check_budget
from moe_coverage_plugin.core.layouts import stored_widths
from moe_coverage_plugin.core.planning import CoveragePlan, plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import Layout
from moe_coverage_plugin.options import (
    AlignmentOptions,
    AttributionOptions,
    ChannelPruningOptions,
    CoverageOptions,
    ExpertImportance,
)
from moe_coverage_plugin.report.summary import summarize
from moe_coverage_plugin.report.view import PlanView

WITHOUT_PRIOR = ("uniform", "topk_channel")
HEADERS = (
    *("layer", "channels", "planned", "kept", "coverage", "experts", "removed", "narrowest", "widest"),
    *("fewest tokens", "most tokens", "without tokens"),
)


class PlanOptions(CoverageOptions, AlignmentOptions):
    """Options of two modifiers, the importance of experts that the scores are read for, and the layout."""

    as_flags: ClassVar[bool] = True

    expert_importance: ExpertImportance = AttributionOptions.model_fields["expert_importance"].default
    """Measure of an expert's importance, which expert_prior attribution uses."""

    layout: Layout = ChannelPruningOptions.model_fields["layout"].default
    """Storage of experts; padded and uniform remove no expert."""


def run(arguments: Namespace) -> None:
    """Print a plan, and write it to files if they are given.

    Raises:
        CoverageError: no score file, options that do not fit it or each other, or a plan that leaves a router too few
            experts.
    """
    given = {name: value for name, value in vars(arguments).items() if name in PlanOptions.model_fields}
    options = PlanOptions(**given)
    scores, provenance = load_scores(arguments.scores)
    plan, aligned, widths_LE = make_plan(scores, options)
    settings = _settings(options)
    facts = {name: str(value) for name, value in settings.items()} | output.provenance_facts(provenance)
    view = PlanView(
        names=scores.names,
        intermediate_size=scores.channels_LEI.shape[-1],
        widths_LE=widths_LE,
        channels_LEI=scores.channels_LEI,
        expert_prior_LE=None if options.intra_layer in WITHOUT_PRIOR else plan.expert_prior_LE,
        layer_loss_L=scores.layer_loss_L,
        layer_prior_L=plan.layer_prior_L if options.uses_layer_loss else None,
        tokens_LE=scores.tokens_LE,
        title=f"{100 * options.sparsity:g} % of expert channels removed",
        summary=summarize(provenance, scores),
        facts=facts,
    )
    summary = {
        "scores": arguments.scores,
        "channel_metric": scores.channel_metric,
        "top_k": scores.top_k,
        "routers": None if scores.routers is None else [router._asdict() for router in scores.routers],
        "intermediate_size": view.intermediate_size,
        "settings": settings,
        "layout": options.layout,
        "provenance": provenance,
        "totals": _totals(view, scores, plan, aligned),
        "layers": _layers(view, scores, plan),
    }
    _show(summary)
    if arguments.json is not None:
        output.write_json(arguments.json, summary)
    if arguments.pictures is not None:
        output.write_pictures(view, arguments.pictures)


def make_plan(scores: AttributionScores, options: PlanOptions) -> tuple[CoveragePlan, Alignment, Tensor]:
    """Plan widths as the modifiers of the same options do.

    Returns:
        The plan, its alignment, and the widths ``[L, E]`` as the layout stores them.

    Raises:
        CoverageError: see :func:`run`.
    """
    layers, experts, channels = scores.channels_LEI.shape
    check_budget(options, options, options.layout, scores.router_needs, experts, channels)
    plan = plan_widths(scores, options, options.expert_importance)
    aligned = align(plan.widths_LE, scores, options, options.scope)
    budget = channel_budget(layers * experts * channels, options.sparsity)
    return plan, aligned, stored_widths(options.layout, aligned.widths_LE, budget, options.block_size)


def _settings(options: PlanOptions) -> dict[str, Any]:
    """Options that the plan depends on."""
    names = ["sparsity", "scope", "intra_layer"]
    if options.scope == "layers":
        names += ["inter_layer", "layer_prior"] if options.inter_layer == "coverage" else ["inter_layer"]
    if options.intra_layer == "coverage":
        names += ["expert_prior", "expert_importance"] if options.uses_attribution else ["expert_prior"]
    if options.uses_layer_loss:
        names.append("smoothing")
    names += ["strategy", "block_size"]
    if options.strategy == "hamilton":
        names += ["min_width", "rule"]
    if options.layout != "ragged":
        names.append("layout")
    return {name: getattr(options, name) for name in names}


def _totals(view: PlanView, scores: AttributionScores, plan: CoveragePlan, aligned: Alignment) -> dict[str, Any]:
    assert view.coverage_L is not None
    score_L = scores.channels_LEI.sum((1, 2))
    has_scores = bool(score_L.sum() > 0)
    return {
        "channels": scores.channels_LEI.numel(),
        "budget": int(plan.widths_LE.sum()),
        "kept": int(view.widths_LE.sum()),
        "unspent": int(plan.widths_LE.sum() - view.widths_LE.sum()),
        "keep_ratio": view.keep_ratio,
        "coverage": float((view.coverage_L * score_L).sum() / score_L.sum()) if has_scores else view.keep_ratio,
        "experts": view.widths_LE.numel(),
        "removed": int(view.removed_LE.sum()),
        "removed_by_alignment": len(aligned.removed),
        "kept_for_routers": aligned.kept_for_routers,
        "layers_raised_for_routers": aligned.raised_layers,
        "kept_for_layout": int(((aligned.widths_LE == 0) & (view.widths_LE > 0)).sum()),
        "without_tokens": int((scores.tokens_LE == 0).sum()),
    }


def _layers(view: PlanView, scores: AttributionScores, plan: CoveragePlan) -> list[dict[str, Any]]:
    assert view.coverage_L is not None
    layers = []
    for layer, name in enumerate(view.names):
        widths_E = view.widths_LE[layer]
        layers.append(
            {
                "name": name,
                "budget": int(plan.widths_LE[layer].sum()),
                "kept": int(widths_E.sum()),
                "keep_ratio": float(view.keep_ratio_L[layer]),
                "coverage": float(view.coverage_L[layer]),
                "narrowest": int(widths_E[widths_E > 0].min()),
                "widest": int(widths_E.max()),
                "removed": torch.nonzero(widths_E == 0).flatten().tolist(),
                "widths": widths_E.tolist(),
                "tokens": scores.tokens_LE[layer].tolist(),
            }
        )
    return layers


def _show(summary: dict[str, Any]) -> None:
    layers, totals = summary["layers"], summary["totals"]
    shape = f"{len(layers)} layers of {len(layers[0]['widths'])} experts with {summary['intermediate_size']} channels"
    picked = "/".join(map(str, sorted(set(summary["top_k"]))))
    head = {
        "scores": f"{summary['scores']}: {summary['channel_metric']}, {shape}, top-{picked}",
        **output.provenance_facts(summary["provenance"]),
        "routers": _routers(summary["routers"]),
        "plan": ", ".join(f"{name} {value}" for name, value in summary["settings"].items()),
    }
    kept = f"{totals['kept']:,} of {totals['channels']:,} kept ({output.percent(totals['keep_ratio'])})"
    unspent = totals["unspent"]
    experts = f"{totals['experts'] - totals['removed']} of {totals['experts']} kept"
    foot = {
        "channels": f"{kept}, {abs(unspent):,} {'above the budget' if unspent < 0 else 'of the budget unspent'}",
        "coverage": f"{output.percent(totals['coverage'])} of the channel scores",
        "experts": f"{experts}, {totals['removed']} removed ({totals['removed_by_alignment']} of them by alignment), "
        f"{totals['without_tokens']} without calibration tokens",
    }
    foot |= {
        name: f"{totals[key]} {what}"
        for name, key, what in (
            ("for routers", "kept_for_routers", "experts kept that the plan removed"),
            ("for routers too", "layers_raised_for_routers", "layers with more channels than planned"),
            (f"for {summary['layout']}", "kept_for_layout", "experts kept that the plan removed"),
        )
        if totals[key]
    }
    print(output.fact_lines(head))
    print(f"\n{output.table(HEADERS, [_row(layer) for layer in layers])}\n")
    print(output.fact_lines(foot))


def _routers(routers: list[dict[str, int]] | None) -> str:
    """Describe what the routers of all layers need, each description once."""
    if routers is None:
        return (
            "groups of experts are unknown, because an earlier release wrote the file: the plan of a router that has "
            "groups may differ"
        )
    described = [
        f"{each['needed']} experts" + (f" in each of {each['groups']} groups" if each["groups"] > 1 else "")
        for each in routers
    ]
    return f"need {' or '.join(dict.fromkeys(described))}"


def _row(layer: dict[str, Any]) -> tuple[object, ...]:
    return (
        output.layer_label(layer["name"]),
        layer["kept"],
        layer["budget"],
        output.percent(layer["keep_ratio"]),
        output.percent(layer["coverage"]),
        len(layer["widths"]) - len(layer["removed"]),
        len(layer["removed"]),
        layer["narrowest"],
        layer["widest"],
        min(layer["tokens"]),
        max(layer["tokens"]),
        layer["tokens"].count(0),
    )
