"""Every combination of the paper's ablation table, planned in one run from one set of scores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor.modifiers import Modifier

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier
from moe_coverage_plugin.modifiers.plan import PlanModifier
from moe_coverage_plugin.options import AlignmentOptions, AttributionOptions, CoverageOptions, Options
from moe_coverage_plugin.options.base import choices
from tests import paper_method
from tests.modifiers.harness import (
    BLOCK,
    CHANNELS,
    EXPERTS,
    LAYERS,
    compress,
    logits,
    open_linear,
    pruning,
    refusal,
    save_tiny,
    widths,
)
from tests.tiny import GROUP_LIMITED, add_tokenizer

pytestmark = pytest.mark.slow

TOTAL = LAYERS * EXPERTS * CHANNELS
SPARSITY = 0.15


def values(options: type[Options], field: str) -> tuple[str, ...]:
    return choices(options.model_fields[field])


INTER, INTRA = values(CoverageOptions, "inter_layer"), values(CoverageOptions, "intra_layer")
LAYER_PRIORS, EXPERT_PRIORS = values(CoverageOptions, "layer_prior"), values(CoverageOptions, "expert_prior")
METRICS = values(AttributionOptions, "channel_metric")
RULES = values(AlignmentOptions, "rule")
OPTIONS: list[dict[str, str]] = [
    *({"inter_layer": a, "intra_layer": b} for a, b in product(INTER, INTRA)),
    *({"layer_prior": a, "expert_prior": b} for a, b in product(LAYER_PRIORS, EXPERT_PRIORS)),
    *({"smoothing": smoothing} for smoothing in values(CoverageOptions, "smoothing")),
]
MEASURES = list(product(METRICS, values(AttributionOptions, "expert_importance")))


@dataclass
class Planned:
    coverage: list[CoverageModifier]
    by_measure: list[CoverageModifier]
    aligned: dict[str, tuple[CoverageModifier, AlignmentModifier]]


@pytest.fixture(scope="module")
def planned(source: Path) -> Planned:
    """One run: an attribution that all plans share, then one for every measure."""
    model = open_linear(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    coverage = [by_paper(**options) for options in OPTIONS]
    aligned = {
        rule: (by_paper(), AlignmentModifier(block_size=32, min_width=64, rule=rule, **paper_method.ALIGNMENT))
        for rule in RULES
    }
    by_measure: list[CoverageModifier] = []
    measured = AttributionModifier(**paper_method.ATTRIBUTION)
    recipe: list[Modifier] = [measured, *coverage, *(m for pair in aligned.values() for m in pair)]
    for metric, importance in MEASURES:
        by_measure.append(by_paper(inter_layer="uniform"))
        measure: Any = {"channel_metric": metric, "expert_importance": importance}
        recipe += [AttributionModifier(**measure), by_measure[-1]]
    compress(model, recipe)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "planning changes no weight"
    return Planned(coverage, by_measure, aligned)


def by_paper(**options: Any) -> CoverageModifier:
    return CoverageModifier(sparsity=SPARSITY, **paper_method.COVERAGE | options)


def budget_of(plan: PlanModifier) -> int:
    return int(plan.plan.widths_LE.sum())


@pytest.mark.parametrize("index", range(len(OPTIONS)), ids=["-".join(options.values()) for options in OPTIONS])
def test_keeps_exactly_the_budget(planned: Planned, index: int):
    plan = planned.coverage[index].plan
    assert int(plan.widths_LE.sum()) == round((1 - SPARSITY) * TOTAL)
    assert bool(((plan.widths_LE >= 0) & (plan.widths_LE <= CHANNELS)).all())
    assert plan.notes["budgets_L"] == plan.widths_LE.sum(-1).tolist()


def widths_by(planned: Planned, **options: str) -> tuple[int, ...]:
    return tuple(planned.coverage[OPTIONS.index(options)].plan.widths_LE.flatten().tolist())


def test_strategies_are_not_one_and_the_same(planned: Planned):
    for inter in INTER:
        plans = {widths_by(planned, inter_layer=inter, intra_layer=intra) for intra in INTRA}
        assert len(plans) == len(INTRA)
    uniform = widths_by(planned, inter_layer="uniform", intra_layer="uniform")
    assert max(uniform) - min(uniform) <= 1
    plans = {widths_by(planned, layer_prior="uniform", expert_prior=prior) for prior in EXPERT_PRIORS}
    assert len(plans) == len(EXPERT_PRIORS)


def test_measures(planned: Planned):
    scores = [modifier.plan.scores.channels_LEI for modifier in planned.by_measure]
    assert all(budget_of(modifier) == round((1 - SPARSITY) * TOTAL) for modifier in planned.by_measure)
    by_metric = {metric: scores[MEASURES.index((metric, "first_order"))] for metric in METRICS}
    assert not torch.allclose(by_metric["activation"], by_metric["weight"])
    assert not torch.allclose(by_metric["weight"], by_metric["weight_activation"])
    for metric in METRICS:
        assert torch.equal(by_metric[metric], scores[MEASURES.index((metric, "second_order"))])


@pytest.mark.parametrize("rule", RULES)
def test_alignment_stays_within_budget_and_reports_the_rest(planned: Planned, rule: str):
    coverage, alignment = planned.aligned[rule]
    before_LE, plan = coverage.plan.widths_LE, alignment.plan
    assert bool((plan.widths_LE % 32 == 0).all())
    assert bool(((plan.widths_LE == 0) | (plan.widths_LE >= 64)).all())
    unspent_L = before_LE.sum(-1) - plan.widths_LE.sum(-1)
    assert bool((unspent_L >= 0).all())
    assert plan.notes["unspent_channels"] == int(unspent_L.sum()) == budget_of(coverage) - budget_of(alignment)
    assert plan.notes["removed_by_alignment"] == int(((before_LE > 0) & (plan.widths_LE == 0)).sum())
    assert plan.block_size == 32


@pytest.mark.parametrize("scope", ["layers", "global"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_blocks_leave_each_group_of_a_router_experts(tmp_path: Path, family: str, scope: Any):
    """Up to the sparsity from which the error says that each group would have less than two blocks."""
    limited = GROUP_LIMITED if family == "deepseek_v2" else {}
    source = add_tokenizer(save_tiny(tmp_path / "model", family, num_hidden_layers=3, **limited))
    model = compress(source, grouped(0.85, scope))
    layers = torch.tensor(widths(model))
    assert bool(((layers > 0).unflatten(1, (2, -1)).sum(-1) >= 2).all())
    message = refusal(source, grouped(0.9, scope), tmp_path / "out")
    assert re.search(r"sparsity=0.9 leaves \d+ of \d+ .* 4 experts need at least \d+: lower", message)


def grouped(sparsity: float, scope: Any) -> list[Modifier]:
    inter_layer = {"inter_layer": "uniform"} if scope == "layers" else {}
    return [
        AttributionModifier(),
        CoverageModifier(sparsity=sparsity, scope=scope, **inter_layer),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(reconstruct=False, pictures=False),
    ]


def test_sparsity_zero_keeps_everything(source: Path, tmp_path: Path):
    model = compress(source, pruning(0.0), output_dir=str(tmp_path / "out"))
    assert widths(model) == [[CHANNELS] * EXPERTS] * LAYERS
    assert torch.equal(logits(model), logits(open_linear(source)))


@pytest.mark.parametrize("samples", [{}, {"shuffle_calibration_samples": True}], ids=["in order", "shuffled"])
def test_same_run_gives_the_same_plan(source: Path, samples: dict[str, bool]):
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(compress(source, pruning(0.4, None), **samples))
    assert widths(results[0]) == widths(results[1])
    assert torch.equal(logits(results[0]), logits(results[1]))
