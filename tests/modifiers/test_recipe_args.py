"""``oneshot(recipe_args=...)`` overrides our options by name, and the written recipe has the values used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_coverage_plugin import Manifest
from tests.modifiers.harness import CHANNELS, EXPERTS, LAYERS, YAML, compress, pruning, widths

pytestmark = pytest.mark.slow

TOTAL = LAYERS * EXPERTS * CHANNELS
AS_MAPPING = {"sparsity": 0.4, "block_size": 32, "min_width": 32, "intra_layer": "topk_channel", "layer_batches": 2}
AS_LIST = [f"{name}={value}" for name, value in AS_MAPPING.items()]


def written(output: Path) -> list[dict[str, dict[str, Any]]]:
    """The options of each modifier in recipe.yaml and in the provenance."""
    stages = yaml.safe_load((output / "recipe.yaml").read_text())
    recipe = {
        name: options for stage in stages.values() for group in stage.values() for name, options in group.items()
    }
    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    provenance = {name: options for entry in manifest.provenance["recipe"] for name, options in entry.items()}
    return [recipe, provenance]


@pytest.mark.parametrize("recipe_args", [AS_MAPPING, AS_LIST], ids=["mapping", "list"])
@pytest.mark.parametrize("recipe", ["objects", "yaml"])
def test_override(source: Path, tmp_path: Path, recipe_args: Any, recipe: str):
    output = tmp_path / "out"
    given = pruning() if recipe == "objects" else YAML
    model = compress(source, given, recipe_args=recipe_args, output_dir=str(output))
    kept = sum(map(sum, widths(model)))
    assert all(width % 32 == 0 for layer in widths(model) for width in layer)
    assert 0.55 * TOTAL <= kept <= 0.6 * TOTAL + 1
    asked = compress(source, pruning(0.4, 32, intra_layer="topk_channel"))
    assert widths(model) == widths(asked)
    for options in written(output):
        assert options["CoverageModifier"]["sparsity"] == 0.4
        assert options["CoverageModifier"]["intra_layer"] == "topk_channel"
        assert options["CoverageModifier"]["inter_layer"] == "uniform"
        assert options["AlignmentModifier"]["block_size"] == 32
        assert options["AlignmentModifier"]["min_width"] == 32
        assert options["AttributionModifier"]["layer_batches"] == 2


def test_args_of_the_recipe_itself(source: Path):
    model = compress(source, f"args: {{sparsity: 0.4}}\n{YAML}")
    assert widths(model) == widths(compress(source, pruning(0.4)))


def test_objects_and_yaml_give_the_same_model(source: Path):
    assert widths(compress(source, YAML)) == widths(compress(source, pruning()))
