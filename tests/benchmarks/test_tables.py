"""The tables hold what was asked for, and every recipe is one that the modifiers take."""

from __future__ import annotations

import pytest
from llmcompressor.modifiers.pruning import REAPPruningModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

import moe_coverage_plugin
from benchmarks.allocation.recipes import quantizer
from benchmarks.allocation.tables import TITLES, Setting, settings

SETTINGS = settings(["c4", "wiki"])
TOOLKIT = {cls.__name__: cls for cls in (REAPPruningModifier, WandaPruningModifier, QuantizationModifier)}


def table(key: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.table == key]


def test_rows_are_told_apart_by_what_tables_show():
    seen = [(row.table, row.name, row.sparsity, row.bits) for row in SETTINGS]
    assert len(set(seen)) == len(seen)
    assert {row.table for row in SETTINGS} == set(TITLES)


@pytest.mark.parametrize("key", list(TITLES))
def test_recipes_hold_fields_of_the_modifiers(key: str):
    for row in table(key):
        for name, fields in (row.recipe.modifiers | quantizer(row.bits)).items():
            modifier = TOOLKIT.get(name) or getattr(moe_coverage_plugin, name)
            assert set(fields) <= set(modifier.model_fields)
            modifier(**fields)


def test_ranges_of_the_comparison():
    sweep = {(row.method, row.sparsity, row.bits) for row in table("sweep")}
    for bits in (16, 8, 4):
        for method in {method for method, _, _ in sweep} - {"unpruned"}:
            assert all((method, sparsity, bits) in sweep for sparsity in (0.15, 0.25, 0.35, 0.45, 0.5, 0.75))
        assert ("unpruned", 0.0, bits) in sweep
    aligned = [row.recipe.modifiers["AlignmentModifier"] for row in table("alignment") if "exact" not in row.name]
    hamilton = {(a["block_size"], a["rule"]) for a in aligned if a["strategy"] == "hamilton"}
    assert hamilton == {(a, rule) for a in (64, 128, 256) for rule in ("l-r-c", "l-r-s")}
    coverage = [row.recipe.modifiers["CoverageModifier"] for row in table("strategies")]
    assert {c.get("inter_layer") for c in coverage} == {"uniform", "u_shaped", "loss", "coverage", None}
    inside = {"uniform", "loss", "router_weight", "usage", "topk_channel", "coverage"}
    assert {c["intra_layer"] for c in coverage} == inside
    priors = {c["expert_prior"] for c in coverage if c["intra_layer"] == "coverage"}
    assert priors == {"attribution", "loss", "usage", "router_weight", "uniform"}
    metrics = {row.recipe.modifiers["AttributionModifier"]["channel_metric"] for row in table("metrics")}
    assert len(metrics) == 7
    smoothings = {row.recipe.modifiers["CoverageModifier"]["smoothing"] for row in table("smoothing")}
    assert smoothings == {"none", "sqrt", "log", "huber", "clip"}


def test_one_corpus_makes_no_table_of_corpora():
    assert not [row for row in settings(["calibration"]) if row.table == "corpora"]
    assert {row.corpus for row in table("corpora")} == {"c4", "wiki"}
