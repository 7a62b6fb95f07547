"""The recommended method end to end: gradients, global blocks, reconstruction; and each of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import mse_loss

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageError,
    CoverageModifier,
    load,
    recipe_path,
    recommended_recipe,
)
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.modifiers.harness import (
    BLOCK,
    CHANNELS,
    EXPERTS,
    LAYERS,
    TOP_K,
    compress,
    logits,
    open_linear,
    pruning,
    widths,
)
from tests.tiny import VOCAB, add_tokenizer, save_model, token_batches

pytestmark = pytest.mark.slow

W4_MEMBERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def global_blocks(
    sparsity: float = 0.5,
    reconstruct: bool = False,
    layout: str = "ragged",
    pictures: bool = False,
    **attribution,
) -> list:
    return [
        AttributionModifier(**attribution),
        CoverageModifier(sparsity=sparsity),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(reconstruct=reconstruct, layout=layout, pictures=pictures),
    ]


def test_python_and_yaml_give_the_same_model(tmp_path: Path):
    wide = save_model(tmp_path / "model", num_hidden_layers=1, num_experts=4, moe_intermediate_size=256)
    python = compress(wide, recommended_recipe(0.25), dataset=token_batches())
    from_yaml = compress(wide, recipe_path("recommended_p25_q4"), dataset=token_batches())
    assert widths(python) == widths(from_yaml)
    assert torch.equal(logits(python), logits(from_yaml))


@pytest.mark.parametrize(("block_size", "group_size"), [(128, 128), (64, 64), (96, 32), (256, 128)])
def test_groups_fit_the_blocks(block_size: int, group_size: int):
    weights = recommended_recipe(0.25, block_size)[-1].config_groups["group_0"].weights.model_dump()
    assert weights["group_size"] == group_size
    assert W4_MEMBERS.items() <= weights.items()


def test_a_layer_that_groups_do_not_divide_is_left_out(tmp_path: Path):
    """Dense first layers have widths of their own, 10944 in DeepSeek-V2-Lite and GLM-4.5-Air."""
    model = add_tokenizer(
        save_model(tmp_path / "model", "deepseek_v2", intermediate_size=352, num_hidden_layers=2, n_routed_experts=4)
    )
    with pytest.raises(CoverageError, match=r'add "model\.layers\.0\.mlp\.down_proj" to its ignore'):
        compress(model, recommended_recipe(0.25, 64), dataset=token_batches(), output_dir=str(tmp_path / "refused"))
    recipe = recommended_recipe(0.25, 64, ignore=["model.layers.0.mlp.down_proj"])
    compress(model, recipe, dataset=token_batches(), output_dir=str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.0.mlp.down_proj", "lm_head"} <= set(written)
    assert not (tmp_path / "refused").exists()


def test_unknown_scheme():
    with pytest.raises(CoverageError, match="scheme='W5A17' is not a preset"):
        recommended_recipe(0.25, scheme="W5A17")


@pytest.mark.parametrize("name", ["recommended_p25_q4", "recommended_p50_q4", "recommended_p50"])
def test_recommended_fields_are_in_the_yaml(name: str):
    """The function builds what a reader of the file sees."""
    stage = yaml.safe_load(Path(recipe_path(name)).read_text())["prune_stage"]["prune_modifiers"]
    sparsity = 0.25 if "p25" in name else 0.5
    recipe = recommended_recipe(sparsity) if name.endswith("q4") else recommended_recipe(sparsity, scheme=None)
    assert [type(modifier).__name__ for modifier in recipe] == list(stage)
    # the fields of the quantizer name a scheme in one and its members in the other
    for modifier in recipe[:4]:
        written = stage[type(modifier).__name__]
        built = modifier.model_dump()
        assert {name: built[name] for name in written} == written


# --- global blocks


def test_global_blocks_spend_the_budget_where_it_counts(source: Path):
    recipe = global_blocks()
    model = compress(source, recipe)
    flat = [width for layer in widths(model) for width in layer]
    assert sum(flat) == LAYERS * EXPERTS * CHANNELS // 2
    assert all(width % BLOCK == 0 for width in flat)
    scores_LEI = recipe[0].measured.channels_LEI
    uniform = torch.full((LAYERS, EXPERTS), CHANNELS // 2)
    assert kept_score(scores_LEI, torch.tensor(widths(model))) > kept_score(scores_LEI, uniform)


def kept_score(scores_LEI: torch.Tensor, widths_LE: torch.Tensor) -> float:
    inside = torch.arange(CHANNELS) < widths_LE[..., None]
    return float((scores_LEI.sort(-1, descending=True).values * inside).sum())


def test_every_layer_keeps_what_its_router_picks(source: Path):
    """At high sparsity one layer alone would take all blocks."""
    model = compress(source, global_blocks(0.85))
    assert all(sum(width > 0 for width in layer) >= TOP_K for layer in widths(model))


@pytest.mark.parametrize("intra_layer", ["coverage", "usage", "router_weight", "uniform"])
def test_global_scope_with_other_strategies(source: Path, intra_layer: str):
    recipe = [
        AttributionModifier(channel_metric="activation", expert_importance="second_order"),
        CoverageModifier(sparsity=0.5, intra_layer=intra_layer),
        ChannelPruningModifier(reconstruct=False),
    ]
    assert sum(map(sum, widths(compress(source, recipe)))) == LAYERS * EXPERTS * CHANNELS // 2


@pytest.mark.parametrize(("metric", "warned"), [("activation", True), ("fisher", False), ("obs", False)])
def test_scores_that_are_not_comparable_between_layers(source: Path, log: list[str], metric: str, warned: bool):
    compress(source, global_blocks(channel_metric=metric)[:2])
    assert any(f"channel_metric='{metric}' does not make comparable" in line for line in log) == warned


# --- reconstruction


@torch.no_grad()
def hidden_error(model, original, ids: torch.Tensor) -> float:
    """Distance of the last hidden states from those of the unpruned model, on the calibration text."""
    return float(mse_loss(model.eval().model(ids).last_hidden_state, original.model(ids).last_hidden_state))


@pytest.mark.parametrize(("layout", "all_experts"), [("ragged", False), ("padded", True)])
def test_reconstruction_brings_the_model_closer(source: Path, tmp_path: Path, layout: str, all_experts: bool):
    # more tokens than channels, otherwise the fit is to noise
    dataset = token_batches(samples=24, length=48)
    ids, original = torch.tensor(dataset["input_ids"][:12]), open_linear(source)
    run = {"dataset": dataset, "moe_calibrate_all_experts": all_experts, "batch_size": 8}
    cut = compress(source, global_blocks(layout=layout), **run)
    fitted = compress(source, global_blocks(layout=layout, reconstruct=True), **run, output_dir=str(tmp_path / "out"))
    assert widths(cut) == widths(fitted)
    assert hidden_error(fitted, original, ids) < 0.97 * hidden_error(cut, original, ids)
    assert torch.equal(logits(load(tmp_path / "out")), logits(fitted))


def test_padding_does_not_change_reconstruction(source: Path):
    """Tokens appended as padding must not change the fit."""
    short = token_batches(samples=8, length=24)
    filler = [[VOCAB - 1] * 8] * 8
    longer = {
        "input_ids": [a + b for a, b in zip(short["input_ids"], filler, strict=True)],
        "attention_mask": [[1] * 24 + [0] * 8] * 8,
    }
    plain = compress(source, global_blocks(reconstruct=True), dataset=short)
    padded = compress(source, global_blocks(reconstruct=True), dataset=type(short).from_dict(longer))
    assert widths(plain) == widths(padded)
    torch.testing.assert_close(logits(padded), logits(plain), rtol=1e-3, atol=1e-3)


def test_obs_keeps_one_of_two_equal_channels(source: Path):
    """Half of the channels are copies of the others; ``fisher`` keeps both channels of an important pair."""
    dataset = token_batches(samples=24, length=48)
    ids, original = torch.tensor(dataset["input_ids"][:12]), with_twins(source)
    errors = {}
    for metric in ("fisher", "obs"):
        recipe = global_blocks(reconstruct=True, channel_metric=metric)
        fitted = compress(with_twins(source), recipe, dataset=dataset, batch_size=8)
        errors[metric] = hidden_error(fitted, original, ids)
    assert errors["obs"] < 0.5 * errors["fisher"]


@torch.no_grad()
def with_twins(source: Path):
    """The model with the first half of the channels of every expert copied to the second half."""
    model, half = open_linear(source), CHANNELS // 2
    for block in find_moe_layers(model):
        for mlp in block.mlps:
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight[half:] = linear.weight[:half]
    return model


def test_obs_scores_from_a_file_give_the_same_model(source: Path, tmp_path: Path):
    path = tmp_path / "scores.bin"
    recipe = global_blocks(reconstruct=True, channel_metric="obs", save_scores=str(path))
    measured = compress(source, recipe, output_dir=str(tmp_path / "measured"))
    fed_back = [AttributionModifier(scores=str(path)), *global_blocks(reconstruct=True)[1:]]
    again = compress(source, fed_back, output_dir=str(tmp_path / "again"))
    assert widths(again) == widths(measured)
    assert sum(map(sum, widths(again))) == LAYERS * EXPERTS * CHANNELS // 2
    assert torch.equal(logits(again), logits(measured))
    assert torch.equal(logits(load(tmp_path / "again")), logits(measured))
    scores, provenance = load_scores(tmp_path / "again" / SCORES_NAME)
    assert scores.channel_metric == provenance["attribution"]["channel_metric"] == "obs"
    assert torch.equal(scores.channels_LEI, recipe[0].measured.channels_LEI)


def test_reconstruction_in_a_shared_pass(source: Path):
    """A pipeline that runs all modifiers in one pass gives the same model."""
    shared, own = (
        compress(source, global_blocks(reconstruct=True), pipeline=pipeline, shuffle_calibration_samples=False)
        for pipeline in ("sequential", "independent")
    )
    assert widths(shared) == widths(own)
    torch.testing.assert_close(logits(shared), logits(own), rtol=1e-3, atol=1e-3)


def test_reconstruction_of_the_papers_plan(source: Path):
    recipe = [*pruning(0.5)[:-1], ChannelPruningModifier(reconstruct=True)]
    assert sum(map(sum, widths(compress(source, recipe)))) <= LAYERS * EXPERTS * CHANNELS // 2


# --- pictures


PICTURES = {"index.html", "widths.png"}


@pytest.mark.parametrize(
    "recipe",
    [
        [*pruning()[:-1], ChannelPruningModifier(reconstruct=False)],
        pruning(0.4, block_size=None, pictures=True),
        pruning(0.5, layout="padded", pictures=True, inter_layer="loss"),
        pruning(0.5, layout="uniform", pictures=True, intra_layer="uniform"),
        global_blocks(0.8, pictures=True),
        global_blocks(pictures=True, channel_metric="activation", layer_noise=1.0),
    ],
    ids=["default", "exact", "padded", "uniform", "removed experts", "layers fade"],
)
def test_a_checkpoint_carries_its_pictures(source: Path, tmp_path: Path, recipe: list):
    """For all measurements, strategies and layouts."""
    compress(source, recipe, output_dir=str(tmp_path / "out"))
    assert {file.name for file in (tmp_path / "out" / "moe_coverage_report").iterdir()} == PICTURES
    assert "](moe_coverage_report/widths.png)" in (tmp_path / "out" / "README.md").read_text()


def test_a_checkpoint_without_pictures(source: Path, tmp_path: Path):
    compress(source, pruning(pictures=False), output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out" / "moe_coverage_report").exists()
    assert "moe_coverage_report/" not in (tmp_path / "out" / "README.md").read_text()
