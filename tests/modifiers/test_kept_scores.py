"""Scores from a file: the same plan without data, and errors for scores of another model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor.modifiers.quantization import QuantizationModifier

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from tests import paper_method
from tests.modifiers.harness import (
    BLOCK,
    W4_GROUP_64,
    compress,
    logits,
    open_linear,
    pruning,
    refusal,
    save_tiny,
    widths,
)

pytestmark = pytest.mark.slow


def fed_back(path: Path, sparsity: float = 0.25, **attribution) -> list:
    return [AttributionModifier(scores=str(path), **attribution), *pruning(sparsity)[1:]]


@pytest.fixture(scope="module")
def kept(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A score file of the tiny model, with scores from gradients."""
    path = tmp_path_factory.mktemp("kept") / "scores.bin"
    compress(source, [AttributionModifier(channel_metric="fisher", layer_noise=1.0, save_scores=str(path))])
    return path


def test_fed_back_scores_give_the_same_model_without_data(source: Path, tmp_path: Path):
    path = tmp_path / "scores.bin"
    recipe = [AttributionModifier(save_scores=str(path), **paper_method.ATTRIBUTION), *pruning()[1:]]
    measured = compress(source, recipe, output_dir=str(tmp_path / "measured"))
    again = compress(source, fed_back(path), dataset=None, output_dir=str(tmp_path / "again"))
    assert widths(again) == widths(measured)
    assert torch.equal(logits(again), logits(measured))
    kept, provenance = load_scores(path)
    for folder in ("measured", "again"):
        beside, measured_on = load_scores(tmp_path / folder / SCORES_NAME)
        assert measured_on == provenance
        assert torch.equal(beside.channels_LEI, kept.channels_LEI)


def test_scores_beside_a_checkpoint_serve_another_sparsity_and_quantizer(source: Path, tmp_path: Path):
    compress(source, pruning(0.25), output_dir=str(tmp_path / "out"))
    path = tmp_path / "out" / SCORES_NAME
    recipe = [*fed_back(path, 0.5), QuantizationModifier(**W4_GROUP_64)]
    again = compress(source, recipe, dataset=None)
    direct = compress(source, [*pruning(0.5), QuantizationModifier(**W4_GROUP_64)])
    assert torch.equal(logits(again), logits(direct))


def test_provenance_is_of_the_run_that_measured(source: Path, kept: Path, tmp_path: Path):
    compress(source, fed_back(kept), dataset=None, output_dir=str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    provenance = config["quantization_config"]["moe_coverage"]["provenance"]
    _, measured = load_scores(kept)
    assert provenance["calibration_sha256"] == measured["calibration_sha256"]
    assert provenance["attribution"]["channel_metric"] == "fisher"
    assert provenance["model"] == str(source)
    assert {"torch_seed", "versions", "recipe", "routers_sha256", "calibration_batches"} <= provenance.keys()


def test_vllm_would_not_load_the_scores_as_weights(source: Path, tmp_path: Path):
    compress(source, pruning(), output_dir=str(tmp_path / "out"))
    assert {file.name for file in (tmp_path / "out").glob("*.safetensors")} == {"model.safetensors"}


def test_scores_of_another_model_of_the_same_shape(source: Path, kept: Path, tmp_path: Path):
    model = open_linear(source)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[0, 0] += 1
    message = refusal(model, fed_back(kept), tmp_path / "out")
    assert "measured on another model" in message
    assert str(kept) in message


def test_16_bit_and_32_bit_copies_of_a_model_share_scores(source: Path, kept: Path, tmp_path: Path):
    low = open_linear(source).to(torch.bfloat16)
    low.save_pretrained(tmp_path / "low")
    assert compress(low, fed_back(kept), dataset=None) is not None


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"num_hidden_layers": 3}, "scores other MoE layers"),
        ({"moe_intermediate_size": 128}, "the model has"),
        ({"num_experts": 4}, "the model has"),
    ],
)
def test_scores_of_another_shape(tmp_path: Path, kept: Path, shape: dict, words: str):
    other = save_tiny(tmp_path / "other", **shape)
    assert words in refusal(other, fed_back(kept), tmp_path / "out")


def test_scores_need_the_same_layers_ignored(pristine, kept: Path, tmp_path: Path):
    message = refusal(pristine, fed_back(kept, ignore=["model.layers.0"]), tmp_path / "out")
    assert "ignore the same layers" in message


def test_damaged_or_absent_scores(pristine, kept: Path, tmp_path: Path):
    damaged = tmp_path / "damaged.bin"
    data = bytearray(kept.read_bytes())
    data[-9] ^= 1
    damaged.write_bytes(data)
    assert "does not match its checksum" in refusal(pristine, fed_back(damaged), tmp_path / "out")
    assert "there is no score file" in refusal(pristine, fed_back(tmp_path / "absent"), tmp_path / "out")
    model = shutil.copyfile(Path(pristine.name_or_path) / "model.safetensors", tmp_path / "weights.bin")
    assert "holds no scores" in refusal(pristine, fed_back(model), tmp_path / "out")


def test_a_metric_that_the_file_does_not_hold(pristine, kept: Path, tmp_path: Path):
    message = refusal(pristine, fed_back(kept, channel_metric="activation"), tmp_path / "out")
    assert "has fisher scores, but channel_metric='activation' is set" in message


def test_an_importance_that_the_file_does_not_hold(pristine, source: Path, tmp_path: Path):
    path = tmp_path / "plain.bin"
    compress(source, [AttributionModifier(channel_metric="activation", save_scores=str(path))])
    message = refusal(pristine, fed_back(path, expert_importance="nll_squared"), tmp_path / "out")
    assert "do not contain nll_squared" in message
    coverage = CoverageModifier(sparsity=0.25, **paper_method.COVERAGE)
    recipe = [AttributionModifier(scores=str(path)), coverage, ChannelPruningModifier(reconstruct=False)]
    assert "do not contain the importance of layers" in refusal(pristine, recipe, tmp_path / "out")


def test_a_file_that_cannot_be_written_stops_the_run_before_measuring(pristine, tmp_path: Path):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "is a directory"), (tmp_path / "file" / "scores", "cannot be created")):
        recipe = [AttributionModifier(save_scores=str(path)), CoverageModifier(sparsity=0.25)]
        assert reason in refusal(pristine, recipe, tmp_path / "out")


def test_reconstruction_still_needs_data(pristine, kept: Path, tmp_path: Path):
    recipe = [
        AttributionModifier(scores=str(kept)),
        CoverageModifier(sparsity=0.25),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(),
    ]
    assert "calibration set is empty" in refusal(pristine, recipe, tmp_path / "out", dataset=None)


@pytest.mark.parametrize("metric", ["fisher", "own"])
def test_recipe_of_a_run_from_a_score_file(source: Path, kept: Path, tmp_path: Path, metric: Any):
    """It has the metric of the file, if that can be written in a recipe, and makes the same checkpoint again."""
    scores, provenance = load_scores(kept)
    save_scores(tmp_path / "scores", replace(scores, channel_metric=metric), provenance)
    recipe = [
        AttributionModifier(scores=str(tmp_path / "scores")),
        CoverageModifier(sparsity=0.25),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(reconstruct=False, pictures=False),
    ]
    first = compress(source, recipe, dataset=None, output_dir=str(tmp_path / "first"))
    assert recipe[0].channel_metric == (metric if metric == "fisher" else AttributionModifier().channel_metric)
    again = compress(source, str(tmp_path / "first" / "recipe.yaml"), dataset=None)
    assert torch.equal(logits(again), logits(first))
