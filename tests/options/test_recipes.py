"""The command line finds wrong fields of a recipe as the modifiers do, without a toolkit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from llmcompressor.modifiers import Modifier

import moe_coverage_plugin
from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.options.recipes import MODIFIERS, TOOLKIT_FIELDS, check_fields

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("CoverageModifier", {"sparsity": 25}),
    ("CoverageModifier", {"sparsity": "25%"}),
    ("CoverageModifier", {"sparsity": "25 %"}),
    ("CoverageModifier", {"sparsity": 1.0}),
    ("CoverageModifier", {"sparsity": 250}),
    ("CoverageModifier", {"sparsty": 0.25}),
    ("CoverageModifier", {}),
    ("CoverageModifier", {"sparsity": 0.5, "inter_layer": "uniform"}),
    ("AlignmentModifier", {"block_size": 0}),
    ("AlignmentModifier", {"strategy": "hamilton", "min_width": 200}),
    ("AttributionModifier", {"channel_metric": "fischer"}),
    ("ChannelPruningModifier", {"layout": "raged"}),
]


@pytest.mark.parametrize(("name", "fields"), WRONG)
def test_errors_are_those_of_the_modifier(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(CoverageError) as made:
        getattr(moe_coverage_plugin, name)(**fields)
    with pytest.raises(CoverageError) as checked:
        check_fields(name, fields, {})
    assert str(checked.value) == str(made.value)


@pytest.mark.parametrize("value", [25, 25.0, "25", "25%", "25 %"])
def test_a_percentage_is_recognized(value: object) -> None:
    """Field case 2.20: a fraction is meant."""
    with pytest.raises(CoverageError, match=r"did you mean 0\.25\?"):
        check_fields("CoverageModifier", {"sparsity": value}, {})
    with pytest.raises(CoverageError, match=r"did you mean 0\.25\?"):
        check_fields("CoverageModifier", {"sparsity": 0.5}, {"sparsity": value})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_package_pass(recipe: Path) -> None:
    for groups in yaml.safe_load(recipe.read_text()).values():
        for modifiers in groups.values():
            for name, fields in modifiers.items():
                check_fields(name, fields, {"sparsity": 0.3, "block_size": 64})


def test_names_are_those_of_the_package_and_the_toolkit() -> None:
    for name, options in MODIFIERS.items():
        assert issubclass(getattr(moe_coverage_plugin, name), options)
    assert set(Modifier.model_fields) >= TOOLKIT_FIELDS
    check_fields("GPTQModifier", {"anything": 1}, {})
    check_fields("AttributionModifier", None, {})
    with pytest.raises(CoverageError, match="give its fields as a mapping"):
        check_fields("AttributionModifier", ["x"], {})


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("prune_stage: {prune_modifiers: {CoverageModifier: {sparsity: 25}}}", "did you mean 0.25?"),
        ("prune: {prune_modifiers: {CoverageModifier: {sparsity: 0.25}}}", "call them 'prune_stage'"),
        (
            "CoverageModifier: {sparsity: 0.25}",
            "it begins with 'CoverageModifier', put the modifiers below prune_stage",
        ),
        ("prune_stage: {CoverageModifier: {sparsity: 0.25}}", "in a group ..._modifiers of a stage ..._stage"),
    ],
)
def test_errors_of_a_recipe_take_seconds(tmp_path: Path, recipe: str, words: str) -> None:
    """Field case 2.20: before torch and the toolkit are imported."""
    (tmp_path / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-m", "moe_coverage_plugin.cli", "oneshot", "model", "--data", __file__]
    command += ["--recipe", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2
    assert words in done.stderr
