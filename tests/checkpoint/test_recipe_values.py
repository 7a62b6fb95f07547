"""What llm-compressor writes into recipe.yaml is read again with the same values."""

from pathlib import Path

import pytest
import yaml
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationMixin, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.recipe import Recipe

from moe_coverage_plugin.checkpoint.recipe_values import write_values

WEIGHTS = QuantizationArgs(num_bits=4, strategy="group", group_size=32, actorder="static")
GROUPS = {"experts": QuantizationScheme(targets=["Linear"], weights=WEIGHTS)}
RECIPES: dict[str, list[Modifier]] = {
    "gptq": [GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])],
    "two": [AWQModifier(), QuantizationModifier(config_groups=GROUPS)],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_with_the_same_values(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    Recipe.from_modifiers(RECIPES[name]).yaml(str(path))
    assert "!!python/" in path.read_text()
    write_values(path)
    read = Recipe.create_instance(str(path)).modifiers
    assert [each.config_groups for each in read if isinstance(each, QuantizationMixin)] == [GROUPS]
    assert list(map(type, read)) == list(map(type, RECIPES[name]))


def test_python_objects_become_values_and_are_not_created(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: !!python/object/apply:os.system [echo]\nb: !!python/tuple [1, 2]\nc: [x, {d: é}]\n")
    write_values(path)
    assert yaml.safe_load(path.read_text()) == {"a": "echo", "b": [1, 2], "c": ["x", {"d": "é"}]}


def test_fields_that_are_not_set_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    Recipe.from_modifiers(RECIPES["two"]).yaml(str(path))
    write_values(path)
    assert "offload_device" not in path.read_text()


def test_another_object_is_left_out_with_a_warning(tmp_path: Path, log: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: !!python/name:torch.float32\nb: 1\n")
    write_values(path)
    assert yaml.safe_load(path.read_text()) == {"b": 1}
    assert log == [
        "WARNING Left out of recipe.yaml: the Python object name:torch.float32, which llm-compressor cannot read"
    ]


def test_other_recipes_are_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# a comment\na: 1\n")
    write_values(path)
    assert path.read_text() == "# a comment\na: 1\n"
