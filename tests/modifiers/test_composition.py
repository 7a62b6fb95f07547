"""Our modifiers together with the toolkit's: one recipe gives the same model as separate runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import REAPPruningModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier

from moe_coverage_plugin import CoverageError, Manifest, load
from tests import processes
from tests.modifiers.harness import (
    EXPERTS,
    LAYERS,
    W4_GROUP_64,
    compress,
    compress_causally,
    logits,
    open_linear,
    pruning,
    widths,
)

pytestmark = pytest.mark.slow

COMPANIONS: dict[str, Any] = {
    "quantization": lambda: [QuantizationModifier(**W4_GROUP_64)],
    "gptq": lambda: [GPTQModifier(**W4_GROUP_64)],
    "awq": lambda: [AWQModifier(n_grid=4), QuantizationModifier(**W4_GROUP_64)],
    "smoothquant": lambda: [SmoothQuantModifier(), QuantizationModifier(**W4_GROUP_64)],
    "channelwise": lambda: [QuantizationModifier(targets=["Linear"], scheme="W8A16", ignore=["lm_head"])],
    "wanda": lambda: [WandaPruningModifier(sparsity=0.5, targets=["re:.*q_proj$"])],
}


needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="the toolkit's AWQ needs one")


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_accelerator if n == "awq" else ()) for n in COMPANIONS])
def test_one_recipe_equals_two_runs(source: Path, tmp_path: Path, name: str):
    companions = COMPANIONS[name]
    block_size = 128 if name == "channelwise" else 64
    together = compress(source, [*pruning(0.3, block_size), *companions()], output_dir=str(tmp_path / "together"))
    pruned = compress(source, pruning(0.3, block_size))
    assert widths(together) == widths(pruned)
    in_turn = compress_causally(pruned, companions(), output_dir=str(tmp_path / "in_turn"))
    assert torch.equal(logits(together), logits(in_turn))

    # a run leaves its model on the accelerator, where there is one
    reopened = load(tmp_path / "together").to(together.device)
    assert torch.equal(logits(reopened), logits(load(tmp_path / "in_turn").to(together.device)))
    assert torch.equal(logits(reopened), logits(together))


def recorded(output: Path) -> dict[str, dict[str, Any]]:
    """Modifier name -> options, over all stages of the written recipe."""
    stages = yaml.safe_load((output / "recipe.yaml").read_text())
    groups = [group for stage in stages.values() for group in stage.values()]
    return {name: options for group in groups for name, options in group.items()}


def test_recipe_in_the_output_records_all(source: Path, tmp_path: Path):
    output = tmp_path / "out"
    compress(source, [*pruning(0.3, layer_noise=1.0), *COMPANIONS["gptq"]()], output_dir=str(output))
    recipe = recorded(output)
    assert list(recipe) == [
        "AttributionModifier",
        "CoverageModifier",
        "AlignmentModifier",
        "ChannelPruningModifier",
        "GPTQModifier",
    ]
    assert recipe["AttributionModifier"]["layer_noise"] == 1.0
    assert recipe["CoverageModifier"]["sparsity"] == 0.3
    assert recipe["AlignmentModifier"]["block_size"] == 64
    assert recipe["GPTQModifier"]["config_groups"]["group_0"]["weights"]["group_size"] == 64
    provenance = Manifest.from_checkpoint(output).provenance
    ours = {name: options for entry in provenance["recipe"] for name, options in entry.items()}
    for name, options in ours.items():
        assert {key: recipe[name][key] for key in options if options[key] is not None} == {
            key: value for key, value in options.items() if value is not None
        }


def test_written_recipe_repeats_the_run(source: Path, tmp_path: Path):
    """Case 29: the recipe beside a checkpoint makes the same checkpoint again."""
    first = compress(source, [*pruning(0.3), *COMPANIONS["quantization"]()], output_dir=str(tmp_path / "out"))
    again = compress(source, str(tmp_path / "out" / "recipe.yaml"))
    assert torch.equal(logits(first), logits(again))


# --- REAP


def test_reap_before_pruning(source: Path, tmp_path: Path):
    output = tmp_path / "out"
    recipe: list[Modifier] = [REAPPruningModifier(sparsity=0.25), *pruning(0.3), *COMPANIONS["quantization"]()]
    model = compress(source, recipe, output_dir=str(output))
    assert model.config.num_experts == EXPERTS * 3 // 4
    manifest = Manifest.from_checkpoint(output)
    assert [len(layer) for layer in manifest.widths.values()] == [EXPERTS * 3 // 4] * LAYERS
    assert list(manifest.widths.values()) == widths(model)
    assert torch.equal(logits(load(output)), logits(model))


def test_reap_before_pruning_equals_two_runs(source: Path):
    together = compress(source, [REAPPruningModifier(sparsity=0.25), *pruning(0.3)])
    in_turn = compress(compress_causally(open_linear(source), REAPPruningModifier(sparsity=0.25)), pruning(0.3))
    assert torch.equal(logits(together), logits(in_turn))


def test_reap_in_a_later_run_stops_if_experts_were_removed(source: Path, tmp_path: Path):
    pruned = compress(source, pruning(0.6))
    assert any(0 in layer for layer in widths(pruned))
    with pytest.raises(CoverageError, match=r"remove entire experts \(REAP\) before pruning channels"):
        compress(pruned, REAPPruningModifier(sparsity=0.25), output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_reap_in_a_later_run(source: Path, tmp_path: Path):
    pruned = compress(source, pruning(0.1, None))
    assert not any(0 in layer for layer in widths(pruned))
    output = tmp_path / "out"
    model = compress(pruned, REAPPruningModifier(sparsity=0.25), output_dir=str(output))
    assert {len(layer) for layer in widths(model)} == {EXPERTS * 3 // 4}
    assert torch.equal(logits(load(output)), logits(model))
    # calibration tokens were those of other experts
    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    assert not manifest.tokens


# --- models as the toolkit offers them


# in another process, because the toolkit's loader patches transformers for all models that are opened later
OPEN_BY_LOADER = """
import sys
import torch
from tests.modifiers.harness import W4_GROUP_64, compress, logits, pruning
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
with load_quantizable_moe():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(logits(compress(model, [*pruning(0.3), QuantizationModifier(**W4_GROUP_64)])), sys.argv[2])
"""


def test_model_object_of_load_quantizable_moe(source: Path, tmp_path: Path):
    from_path = compress(source, [*pruning(0.3), *COMPANIONS["quantization"]()])
    done = processes.run("-c", OPEN_BY_LOADER, source, tmp_path / "logits.pt")
    assert done.returncode == 0, done.stderr[-3000:]
    # the weights are the same bits at other addresses, which changes the last bit of a sum
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(from_path), rtol=0, atol=1e-5)
