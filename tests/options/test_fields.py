"""The options of modifiers, fine-tuning and evaluation: ranges, defaults, and what the documentation says of them."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import (
    AlignmentOptions,
    AttributionOptions,
    ChannelPruningOptions,
    CoverageOptions,
    EvaluationOptions,
    Options,
    RecoveryOptions,
)
from moe_coverage_plugin.options.base import choices, kind, summary

REPOSITORY = Path(__file__).parents[2]
CLASSES = (
    *(AttributionOptions, CoverageOptions, AlignmentOptions, ChannelPruningOptions),
    *(RecoveryOptions, EvaluationOptions),
)
REQUIRED: dict[type[Options], dict[str, Any]] = {CoverageOptions: {"sparsity": 0.25}}
# what a field needs to have an effect
NEEDED: dict[str, dict[str, str]] = {
    "inter_layer": {"scope": "layers"},
    "layer_prior": {"scope": "layers"},
    "smoothing": {"scope": "layers"},
    "expert_prior": {"intra_layer": "coverage"},
    "rule": {"strategy": "hamilton"},
}


def make(options: type[Options], **values: Any) -> Options:
    return options(**REQUIRED.get(options, {}) | values)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        *((CoverageOptions, {"sparsity": value}) for value in (-0.1, 1.0, 1.5, 25, math.nan, math.inf, None, "much")),
        *((AttributionOptions, {"layer_noise": value}) for value in (0.0, 1.5, -1)),
        *((AttributionOptions, {"ema": value, "channel_metric": "activation"}) for value in (0.0, 1.0)),
        (AttributionOptions, {"layer_batches": 0}),
        *((AlignmentOptions, {"block_size": value}) for value in (0, -64, 1.5)),
        (AlignmentOptions, {"min_width": -1, "strategy": "hamilton"}),
        *((RecoveryOptions, {"expert_rank": value}) for value in (0, "many")),
        *((RecoveryOptions, {"held_out": value}) for value in (0, 1, math.nan)),
        (EvaluationOptions, {"limit": 0}),
    ],
)
def test_values_out_of_range(options: type[Options], values: dict[str, Any]) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(CoverageError, match=re.escape(f"{name}={value!r} of {options.__name__} must be ")):
        make(options, **values)


@pytest.mark.parametrize(
    ("options", "name"),
    [(options, name) for options in CLASSES for name, field in options.model_fields.items() if choices(field)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_unknown_choice_names_the_known(options: type[Options], name: str) -> None:
    known = ", ".join(choices(options.model_fields[name]))
    with pytest.raises(
        CoverageError, match=re.escape(f"{name}='nonsense' of {options.__name__} must be one of {known}")
    ):
        make(options, **{name: "nonsense"})
    for choice in choices(options.model_fields[name]):
        assert getattr(make(options, **NEEDED.get(name, {}) | {name: choice}), name) == choice


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        (CoverageOptions, {"inter_layer": "uniform"}, "inter_layer='uniform' would do nothing with scope='global'"),
        (CoverageOptions, {"scope": "global", "layer_prior": "uniform"}, "layer_prior='uniform' would do nothing"),
        (CoverageOptions, {"expert_prior": "usage"}, "expert_prior='usage' would do nothing with intra_layer='topk_"),
        (
            ChannelPruningOptions,
            {"reconstruct": False, "refit": "down"},
            "refit='down' would do nothing with reconstruct",
        ),
        (AlignmentOptions, {"min_width": 64}, "min_width=64 would do nothing with strategy='blocks'"),
        (AlignmentOptions, {"strategy": "blocks", "rule": "l-r-s"}, "rule='l-r-s' would do nothing"),
        (
            AttributionOptions,
            {"labels": "model", "channel_metric": "activation"},
            "labels='model' would do nothing with",
        ),
        (AttributionOptions, {"ema": 0.9}, "ema=0.9 does not average gradients, which channel_metric='obs' needs"),
        (
            AttributionOptions,
            {"ema": 0.9, "channel_metric": "weight", "expert_importance": "nll_signed"},
            "which expert_importance='nll_signed' needs",
        ),
        (AlignmentOptions, {"strategy": "hamilton", "min_width": 200}, "minimum width 200 is neither"),
        (EvaluationOptions, {"model_args": {"max_model_len": 64}}, "arguments of vLLM's engine"),
        (EvaluationOptions, {"backend": "vllm", "device": "cuda"}, "set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_options_that_contradict_each_other(options: type[Options], values: dict[str, Any], words: str) -> None:
    with pytest.raises(CoverageError, match=re.escape(words)):
        make(options, **values)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (CoverageOptions, {"scope": "layers", "inter_layer": "uniform", "layer_prior": "uniform"}),
        (CoverageOptions, {"scope": "global", "inter_layer": "coverage", "layer_prior": "loss"}),
        (CoverageOptions, {"intra_layer": "usage", "expert_prior": "usage"}),
        (AlignmentOptions, {"strategy": "hamilton", "min_width": 64, "rule": "l-r-s"}),
        (AlignmentOptions, {"strategy": "blocks", "block_size": 64, "min_width": 128, "rule": "l-r-c"}),
        (AttributionOptions, {"layer_batches": 2}),
        (AttributionOptions, {"ema": 0.9, "channel_metric": "activation"}),
        (ChannelPruningOptions, {"reconstruct": False, "refit": "all"}),
        (ChannelPruningOptions, {"refit": "down"}),
    ],
)
def test_options_that_fit(options: type[Options], values: dict[str, Any]) -> None:
    made = make(options, **values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize("options", CLASSES)
def test_all_fields_written_out_are_accepted(options: type[Options]) -> None:
    """As in the recipe that llm-compressor writes, which leaves out fields that are ``None``."""
    listed = {name: value for name, value in make(options).model_dump().items() if value is not None}
    assert make(options, **listed) == make(options)


def test_the_recipe_that_relied_on_old_defaults_stops() -> None:
    """Version 0.1 had other defaults, so its recipe of the paper's method left ``scope`` and ``strategy`` out."""
    with pytest.raises(CoverageError, match="use scope='layers'"):
        CoverageOptions(sparsity=0.25, inter_layer="coverage", intra_layer="coverage", smoothing="sqrt")
    with pytest.raises(CoverageError, match="use strategy='hamilton'"):
        AlignmentOptions(block_size=128, min_width=128, rule="l-r-c")


def test_defaults_are_the_recommended_method() -> None:
    attribution, coverage = AttributionOptions(), CoverageOptions(sparsity=0.25)
    assert attribution.channel_metric == "obs"
    assert attribution.layer_noise is None
    assert (coverage.scope, coverage.intra_layer) == ("global", "topk_channel")
    # everything that the plan needs is measured
    assert not coverage.uses_layer_loss
    assert not coverage.uses_attribution
    assert (AlignmentOptions().strategy, AlignmentOptions().block_size) == ("blocks", 128)
    assert (ChannelPruningOptions().reconstruct, ChannelPruningOptions().refit) == (True, "all")


@pytest.mark.parametrize("options", CLASSES)
def test_every_field_is_described_in_a_phrase(options: type[Options]) -> None:
    for name, field in options.model_fields.items():
        assert 10 < len(summary(field)) < 110, name
        assert not re.search(r"[.:] [A-Z]|``", summary(field)), name
        assert kind(field) in (bool, int, float, str, list, dict)


def documented_fields() -> dict[str, dict[str, str]]:
    """Defaults in the tables of docs/recipes.md, by modifier."""
    text = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    fields = text[text.index("\n## Fields\n") : text.index("\n## Channel scores\n")]
    tables = {}
    for section in fields.split("\n### ")[1:]:
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
        tables[section.partition("\n")[0]] = {name: default.strip("`") for name, default in rows}
    return tables


@pytest.mark.parametrize("options", CLASSES[:4])
def test_documentation_lists_every_field_and_its_default(options: type[Options]) -> None:
    defaults = {
        name: "required" if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in options.model_fields.items()
    }
    words = {None: "null", True: "true", False: "false"}
    expected = {
        name: words.get(value) if value in (None, True, False) else str(value) for name, value in defaults.items()
    }
    assert documented_fields()[options.__name__.replace("Options", "Modifier")] == expected


def test_options_need_neither_torch_nor_a_toolkit() -> None:
    code = "import sys, moe_coverage_plugin.options; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert "pydantic" in modules
    assert not modules & {"torch", "numpy", "transformers", "llmcompressor", "compressed_tensors", "vllm"}
