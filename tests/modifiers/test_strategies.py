"""Every combination of the paper's ablation table, planned in one run from one set of scores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from llmcompressor.modifiers import Modifier

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier
from moe_coverage_plugin.core.alignment import RemainderRule
from moe_coverage_plugin.core.allocation import InterLayer, IntraLayer
from moe_coverage_plugin.core.attribution import ChannelMetric, ExpertImportance
from moe_coverage_plugin.core.smoothing import Smoothing
from moe_coverage_plugin.modifiers.coverage import ExpertPrior, LayerPrior
from moe_coverage_plugin.modifiers.plan import PlanModifier
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

TOTAL = LAYERS * EXPERTS * CHANNELS
SPARSITY = 0.15
OPTIONS: list[dict[str, str]] = [
    *({"inter_layer": a, "intra_layer": b} for a, b in product(get_args(InterLayer), get_args(IntraLayer))),
    *({"layer_prior": a, "expert_prior": b} for a, b in product(get_args(LayerPrior), get_args(ExpertPrior))),
    *({"smoothing": smoothing} for smoothing in get_args(Smoothing)),
]
MEASURES = list(product(get_args(ChannelMetric), get_args(ExpertImportance)))


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
    coverage = [CoverageModifier(sparsity=SPARSITY, **options) for options in OPTIONS]
    aligned = {
        rule: (CoverageModifier(sparsity=SPARSITY), AlignmentModifier(block_size=32, min_width=64, rule=rule))
        for rule in get_args(RemainderRule)
    }
    by_measure: list[CoverageModifier] = []
    recipe: list[Modifier] = [AttributionModifier(), *coverage, *(m for pair in aligned.values() for m in pair)]
    for metric, importance in MEASURES:
        by_measure.append(CoverageModifier(sparsity=SPARSITY))
        recipe += [AttributionModifier(channel_metric=metric, expert_importance=importance), by_measure[-1]]
    compress(model, recipe)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "planning changes no weight"
    return Planned(coverage, by_measure, aligned)


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
    for inter in get_args(InterLayer):
        plans = {widths_by(planned, inter_layer=inter, intra_layer=intra) for intra in get_args(IntraLayer)}
        assert len(plans) == len(get_args(IntraLayer))
    uniform = widths_by(planned, inter_layer="uniform", intra_layer="uniform")
    assert max(uniform) - min(uniform) <= 1
    plans = {widths_by(planned, layer_prior="uniform", expert_prior=prior) for prior in get_args(ExpertPrior)}
    assert len(plans) == len(get_args(ExpertPrior))


def test_measures(planned: Planned):
    scores = [modifier.plan.scores.channels_LEI for modifier in planned.by_measure]
    assert all(budget_of(modifier) == round((1 - SPARSITY) * TOTAL) for modifier in planned.by_measure)
    by_metric = {metric: scores[MEASURES.index((metric, "first_order"))] for metric in get_args(ChannelMetric)}
    assert not torch.allclose(by_metric["activation"], by_metric["weight"])
    assert not torch.allclose(by_metric["weight"], by_metric["weight_activation"])
    for metric in get_args(ChannelMetric):
        assert torch.equal(by_metric[metric], scores[MEASURES.index((metric, "second_order"))])


@pytest.mark.parametrize("rule", get_args(RemainderRule))
def test_alignment_stays_within_budget_and_tells_the_rest(planned: Planned, rule: str):
    coverage, alignment = planned.aligned[rule]
    before_LE, plan = coverage.plan.widths_LE, alignment.plan
    assert bool((plan.widths_LE % 32 == 0).all())
    assert bool(((plan.widths_LE == 0) | (plan.widths_LE >= 64)).all())
    unspent_L = before_LE.sum(-1) - plan.widths_LE.sum(-1)
    assert bool((unspent_L >= 0).all())
    assert plan.notes["unspent_channels"] == int(unspent_L.sum()) == budget_of(coverage) - budget_of(alignment)
    assert plan.notes["dropped_by_alignment"] == int(((before_LE > 0) & (plan.widths_LE == 0)).sum())
    assert plan.block_size == 32


@pytest.mark.parametrize("scope", ["layers", "global"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_blocks_leave_each_group_of_a_router_experts(tmp_path: Path, family: str, scope: Any):
    """Down to the sparsity that is named where too little is left, by which each group has two blocks."""
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
        AttributionModifier(channel_metric="fisher", layer_noise=None),
        CoverageModifier(sparsity=sparsity, scope=scope, intra_layer="topk_channel", **inter_layer),
        AlignmentModifier(block_size=BLOCK, strategy="blocks"),
        ChannelPruningModifier(pictures=False),
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
