"""A plan is shown as it would be made, from the scores of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from transformers import AutoModelForCausalLM

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageError,
    CoverageModifier,
    Manifest,
)
from moe_coverage_plugin.cli import COMMANDS
from moe_coverage_plugin.cli.arguments import build_parser
from moe_coverage_plugin.cli.plan import PlanOptions, make_plan
from moe_coverage_plugin.core.alignment import align_blocks
from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.options import CoverageOptions
from tests.tiny import GROUP_LIMITED, add_tokenizer, save_model, token_batches

pytestmark = pytest.mark.slow

# the options of harness.pruning()
AS_PRUNED = ("--sparsity", 0.25, "--scope", "layers", "--inter-layer", "uniform", "--intra-layer", "coverage")
AS_ALIGNED = ("--strategy", "hamilton", "--block-size", 64, "--min-width", 64)


@pytest.fixture
def scores(pruned: Path) -> Path:
    return pruned / SCORES_NAME


def planned(script: Any, tmp_path: Path, *arguments: object) -> dict[str, Any]:
    done = script("plan", *arguments, "--json", tmp_path / "plan.json")
    assert done.status == 0, done.err
    return json.loads((tmp_path / "plan.json").read_text())


def test_shows_the_plan_that_a_run_made(script: Any, pruned: Path, scores: Path, tmp_path: Path) -> None:
    summary = planned(script, tmp_path, scores, *AS_PRUNED, *AS_ALIGNED)
    manifest = Manifest.from_checkpoint(pruned)
    assert manifest is not None
    assert {layer["name"]: layer["widths"] for layer in summary["layers"]} == manifest.widths
    report = json.loads((pruned / "moe_coverage_report.json").read_text())
    for layer in summary["layers"]:
        reported = report["layers"][layer["name"]]
        assert layer["tokens"] == reported["tokens"]
        assert layer["coverage"] == pytest.approx(reported["coverage"], rel=1e-12)
    assert summary["totals"]["unspent"] == report["plan"]["unspent_channels"]
    assert [layer["budget"] for layer in summary["layers"]] == report["plan"]["budgets_L"]


def test_figures_are_those_of_the_widths(script: Any, scores: Path, tmp_path: Path) -> None:
    summary = planned(script, tmp_path, scores, "--sparsity", 0.5, "--block-size", 32)
    channels_LEI = load_scores(scores)[0].channels_LEI
    kept_score = 0.0
    for layer, scores_EI in zip(summary["layers"], channels_LEI, strict=True):
        widths = layer["widths"]
        best = sum(float(scores_EI[expert].topk(width).values.sum()) for expert, width in enumerate(widths))
        kept_score += best
        assert layer["coverage"] == pytest.approx(best / float(scores_EI.sum()))
        assert layer["keep_ratio"] == pytest.approx(sum(widths) / scores_EI.numel())
        assert layer["kept"] == sum(widths)
        assert layer["removed"] == [expert for expert, width in enumerate(widths) if width == 0]
        assert (layer["narrowest"], layer["widest"]) == (min(filter(None, widths)), max(widths))
    totals = summary["totals"]
    assert totals["coverage"] == pytest.approx(kept_score / float(channels_LEI.sum()))
    assert totals["kept"] == sum(layer["kept"] for layer in summary["layers"])
    assert totals["kept"] + totals["unspent"] == totals["budget"] == totals["channels"] // 2
    assert totals["removed"] == sum(len(layer["removed"]) for layer in summary["layers"])


def test_defaults_are_the_recommended_recipe(script: Any, scores: Path, tmp_path: Path) -> None:
    summary = planned(script, tmp_path, scores, "--sparsity", 0.25)
    assert summary["settings"] == {
        "sparsity": 0.25,
        "scope": "global",
        "intra_layer": "topk_channel",
        "strategy": "blocks",
        "block_size": 128,
    }
    found = load_scores(scores)[0]
    plan = plan_widths(found, CoverageOptions(sparsity=0.25))
    aligned = align_blocks(plan.widths_LE, found.channels_LEI, 128, found.top_k, across_layers=True)
    assert [layer["widths"] for layer in summary["layers"]] == aligned.widths_LE.tolist()


def test_says_what_the_scores_were_measured_on(script: Any, scores: Path, source: Path) -> None:
    out = script("plan", scores, "--sparsity", 0.25).out
    assert str(source) in out
    assert "calibration_batches" in out
    assert "activation, 2 layers of 8 experts with 256 channels, top-2" in out
    assert "3,072 of 4,096 kept (75.0 %), 0 of the budget unspent" in out


def test_draws_it(script: Any, scores: Path, tmp_path: Path) -> None:
    done = script("plan", scores, "--sparsity", 0.25, "--pictures", tmp_path / "pictures")
    assert done.status == 0
    assert {"index.html", "widths.png"} <= {file.name for file in (tmp_path / "pictures").iterdir()}


def test_scores_without_tokens_can_be_planned(script: Any, tmp_path: Path) -> None:
    zeros_LE = torch.zeros(1, 4, dtype=torch.float64)
    zeros_LEI = torch.zeros(1, 4, 8, dtype=torch.float64)
    scores = AttributionScores(["experts"], [1], "fisher", zeros_LEI, zeros_LE, zeros_LE, zeros_LE.long(), zeros_LE)
    save_scores(tmp_path / "scores.bin", scores, {})
    summary = planned(script, tmp_path, tmp_path / "scores.bin", "--sparsity", 0.5, "--block-size", 2)
    assert summary["totals"]["coverage"] == summary["totals"]["keep_ratio"] == 0.5
    assert summary["totals"]["without_tokens"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sparsity", 1), "--sparsity 1.0 must be a number, at least 0 and below 1"),
        (("--sparsity", 25), "did you mean 0.25?"),
        (("--sparsity", "nan"), "--sparsity nan must be a number"),
        (("--sparsity", 0.5, "--block-size", 100), "block size 100 does not divide the 256 channels"),
        (("--sparsity", 0.5, "--block-size", 0), "--block-size 0 must be an integer, at least 1"),
        (("--sparsity", 0.5, "--inter-layer", "loss"), "--inter-layer loss would do nothing with --scope global"),
        (("--sparsity", 0.5, "--layer-prior", "loss"), "leave it out, or use --scope layers"),
        (("--sparsity", 0.5, "--min-width", 0, "--rule", "l-r-s"), "--min-width 0 and --rule l-r-s would do nothing"),
        (("--sparsity", 0.5, "--strategy", "hamilton", "--min-width", 200), "minimum width 200"),
        (("--sparsity", 0.99), "--sparsity 0.99 leaves 41 of 4096 expert channels"),
        (("--sparsity", 0.9, "--strategy", "hamilton"), "lower it, for instance to 0.5,"),
        (
            ("--sparsity", 0.5, "--intra-layer", "coverage", "--expert-importance", "nll_squared"),
            "do not contain nll_squared",
        ),
    ],
)
def test_what_cannot_be_planned_stops(refusal: Any, scores: Path, arguments: Any, words: str) -> None:
    assert words in refusal("plan", scores, *arguments)


def test_files_that_are_no_scores_are_refused(refusal: Any, pruned: Path, tmp_path: Path) -> None:
    assert "there is no score file" in refusal("plan", tmp_path / "absent", "--sparsity", 0.5)
    assert "holds no scores" in refusal("plan", pruned / "model.safetensors", "--sparsity", 0.5)
    assert "cannot be read" in refusal("plan", pruned / "config.json", "--sparsity", 0.5)


def test_files_that_cannot_be_written_are_refused(refusal: Any, scores: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "plan.json"):
        assert "cannot be" in refusal("plan", scores, "--sparsity", 0.5, "--json", path)
    assert "is not a directory" in refusal("plan", scores, "--sparsity", 0.5, "--pictures", tmp_path / "file")


def test_flags_are_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Every field of the options is a flag of the command, and one that is not given has the default of its field."""
    parser = build_parser(dict.fromkeys(COMMANDS))
    given = vars(parser.parse_args(["plan", "scores", "--sparsity", "0.5", "--block-size", "64"]))
    assert {name: given[name] for name in ("sparsity", "block_size")} == {"sparsity": 0.5, "block_size": 64}
    assert given.keys() == {"scores", "sparsity", "block_size", "json", "pictures", "run"}
    with pytest.raises(SystemExit):
        parser.parse_args(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, field in PlanOptions.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.is_required() or f"(default: {field.default})" in text


def test_help_of_other_commands_does_not_import_pydantic() -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"
    program += "from moe_coverage_plugin.cli import main; main()"
    for arguments in (["--help"], ["inspect", "--help"]):
        command = [sys.executable, "-c", program, *arguments]
        modules = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        assert "argparse" in modules
        assert "pydantic" not in modules


COMBINATIONS = [
    {"scope": "global"},
    {"scope": "global", "intra_layer": "coverage"},
    {"scope": "layers", "inter_layer": "uniform", "intra_layer": "coverage"},
    {"scope": "layers", "inter_layer": "u_shaped", "intra_layer": "usage"},
    {"scope": "layers", "inter_layer": "coverage", "layer_prior": "uniform", "intra_layer": "topk_channel"},
]
ALIGNMENTS = [{"block_size": 32}, {"block_size": 64}, {"block_size": 32, "strategy": "hamilton", "min_width": 64}]
LAYOUTS, SPARSITIES = ("ragged", "padded"), (0.5, 0.875)
ROUTERS = ["qwen3_moe", "deepseek_v2", "deepseek_v3", "minimax_m2"]
# every pair of an alignment, a layout and a sparsity
CASES = [
    (alignment, layout, SPARSITIES[(number + kind) % 2])
    for number, alignment in enumerate(ALIGNMENTS)
    for kind, layout in enumerate(LAYOUTS)
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A source of each kind of router (softmax, groups, groups with biases, sigmoid), and its scores."""

    @cache
    def measure(router: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(router)
        limited = GROUP_LIMITED if router == "deepseek_v2" else {}
        source = add_tokenizer(save_model(directory / "model", router, num_hidden_layers=3, **limited))
        oneshot(
            model=str(source),
            dataset=token_batches(samples=3, length=16),
            recipe=[AttributionModifier(save_scores=str(directory / "scores"))],
        )
        return source, directory / "scores"

    return measure


@pytest.mark.parametrize(
    ("router", "number"),
    [(router, number) for router in range(len(ROUTERS)) for number in range(router % 2, len(COMBINATIONS), 2)],
)
def test_plan_is_what_the_modifier_makes(
    measured: Callable[[str], tuple[Path, Path]], router: int, number: int
) -> None:
    """Field case 2.8: for every kind of router, also if a budget leaves only what routers need.

    Each combination of strategies makes all cases once, half of them with one kind of router and half with another.
    """
    source, file = measured(ROUTERS[router])
    options: dict[str, Any] = COMBINATIONS[number]
    scores, _ = load_scores(file)
    model = AutoModelForCausalLM.from_pretrained(source)
    linearize_moe(model)
    for alignment, layout, sparsity in CASES[router // 2 :: 2]:
        given = {"sparsity": sparsity} | options
        try:
            shown = make_plan(scores, PlanOptions(**given, **alignment, layout=layout))[2]
        except CoverageError as error:
            shown = str(error)
        recipe = [
            AttributionModifier(scores=str(file)),
            CoverageModifier(**given),
            AlignmentModifier(**alignment),
            ChannelPruningModifier(layout=layout, reconstruct=False, pictures=False),
        ]
        pruned = deepcopy(model)
        try:
            oneshot(model=pruned, dataset=token_batches(samples=1, length=8), recipe=recipe)
            made = torch.stack([modifier_widths(layer) for layer in find_moe_layers(pruned)])
        except CoverageError as error:
            made = str(error)
        if isinstance(shown, str):
            assert made == shown.replace("--sparsity ", "sparsity="), (given, alignment, layout)
        else:
            assert torch.equal(shown, made), (given, alignment, layout)


def modifier_widths(layer: Any) -> torch.Tensor:
    """Channels of each expert that are not padding."""
    kept = [mlp.down_proj.weight.any(0).sum() if hasattr(mlp, "down_proj") else torch.tensor(0) for mlp in layer.mlps]
    return torch.stack(kept)


@pytest.mark.parametrize("router", ROUTERS)
def test_scores_of_an_earlier_release_say_that_groups_are_unknown(
    script: Any, measured: Callable[[str], tuple[Path, Path]], tmp_path: Path, router: str
) -> None:
    """Field case 2.8: such files are read, and the plan says what it does not know."""
    _, file = measured(router)
    scores, provenance = load_scores(file)
    assert scores.routers is not None
    out = script("plan", file, "--sparsity", 0.5, "--block-size", 32).out
    assert f"need {scores.routers[0].needed} experts" in out
    assert ("in each of 2 groups" in out) == (scores.routers[0].groups == 2)
    save_scores(tmp_path / "old", replace(scores, routers=None), provenance)
    assert load_scores(tmp_path / "old")[0].routers is None
    out = script("plan", tmp_path / "old", "--sparsity", 0.5, "--block-size", 32).out
    assert "groups of experts are unknown" in out
