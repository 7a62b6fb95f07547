"""Recipes and data sets that the toolkit would pass over stop a run with this package's modifiers.

Field case 2.20: a stage with another name made an unchanged model, and rows of chats "num_samples should be positive".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoTokenizer

from moe_coverage_plugin import CoverageError, Manifest, load
from tests.modifiers.harness import W4_GROUP_64, YAML, compress, pruning, save_tiny
from tests.tiny import VOCAB, add_tokenizer, token_batches

pytestmark = pytest.mark.slow

OURS = yaml.safe_load(YAML)["prune_stage"]["prune_modifiers"]
QUANTIZER = {"QuantizationModifier": {"targets": ["Linear"], "scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}}
SKIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "stage": ({"prune": {"prune_modifiers": OURS}}, "call them 'prune_stage' and 'prune_modifiers'"),
    "group": ({"prune_stage": {"steps": OURS}}, "call them 'prune_stage' and 'steps_modifiers'"),
    "no group": ({"prune_stage": OURS}, "names no modifiers where llm-compressor looks"),
    "no stage": ({"prune_modifiers": OURS}, "names no modifiers where llm-compressor looks"),
    "too deep": ({"prune_stage": {"a": {"prune_modifiers": OURS}}}, "names no modifiers where llm-compressor looks"),
    "numbered": ({"a_stage_0": {"a_modifiers": OURS}}, "call them 'a_0_stage' and 'a_modifiers'"),
    "quantizer": ({"a_stage": {"a_modifiers": OURS}, "b": {"b_modifiers": QUANTIZER}}, "call them 'b_stage'"),
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of words."""
    return add_tokenizer(save_tiny(tmp_path_factory.mktemp("early") / "source"))


def message_of(source: Path, recipe: Any, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(CoverageError) as error:
        oneshot(model=str(source), recipe=recipe, output_dir=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize("given", ["file", "string", "JSON"])
@pytest.mark.parametrize("kind", SKIPPED)
def test_modifiers_that_the_toolkit_would_skip(named: Path, tmp_path: Path, kind: str, given: str) -> None:
    content, words = SKIPPED[kind]
    text = json.dumps(content) if given == "JSON" else yaml.safe_dump(content)
    recipe = text
    if given == "file":
        (tmp_path / "own.yaml").write_text(text)
        recipe = str(tmp_path / "own.yaml")
    message = message_of(named, recipe, tmp_path, dataset=token_batches())
    assert words in message
    assert f"recipe {recipe if given == 'file' else 'in a string'} " in message


def test_recipes_of_others_are_left_to_the_toolkit(named: Path, tmp_path: Path) -> None:
    """It does nothing with this one, and does not say so."""
    recipe = yaml.safe_dump({"quantize": {"modifiers": QUANTIZER}})
    oneshot(model=str(named), recipe=recipe, output_dir=str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()
    chat = Dataset.from_dict({"messages": [[{"role": "user", "content": "w5"}]]})
    with pytest.raises(ValueError, match="num_samples"):
        oneshot(model=str(named), recipe=QuantizationModifier(**W4_GROUP_64), dataset=chat)


def rows(column: str, values: Sequence[Any] = ("w5 w6 w7",)) -> Dataset:
    return Dataset.from_dict({column: list(values)})


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (rows("messages", [[{"role": "user", "content": "w5"}]]), {}, "only messages: make text of 'messages' by"),
        (rows("conversations", [[{"from": "human", "value": "w5"}]]), {}, "make text of 'conversations' by"),
        (rows("body"), {}, "has no text in 'text', only body: name the column"),
        (rows("text"), {"text_column": "body"}, None),
        (rows("body"), {"text_column": "content"}, "has no text in 'content', only body"),
        (rows("text", []), {}, "the data set has 0 rows"),
        (rows("body"), {"text_column": "body"}, None),
        (rows("body"), {"preprocessing_func": lambda row: {"text": row["body"]}}, None),
        (rows("input_ids", [[5, 6, 7]]), {}, None),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("recipe", ["objects", "YAML"])
def test_data_sets_without_text(
    named: Path, tmp_path: Path, recipe: str, data: Dataset, options: dict[str, Any], words: str | None
) -> None:
    given = pruning() if recipe == "objects" else YAML
    if words is None:
        options |= {"max_seq_length": 16, "output_dir": str(tmp_path / "out")}
        oneshot(model=str(named), recipe=given, dataset=data, **options)
        assert Manifest.from_checkpoint(tmp_path / "out") is not None
    else:
        assert words in message_of(named, given, tmp_path, dataset=data, **options)


def test_text_of_chats_is_taken(named: Path, tmp_path: Path) -> None:
    """The remedy that the message names."""
    tokenizer = AutoTokenizer.from_pretrained(named)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    chats = [[{"role": "user", "content": f"w{number}"}] for number in range(5, min(VOCAB, 15))]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    options: dict[str, Any] = {"max_seq_length": 16, "output_dir": str(tmp_path / "out")}
    oneshot(model=str(named), recipe=pruning(), dataset=rows("text", texts), **options)
    assert Manifest.from_checkpoint(tmp_path / "out") is not None


def test_the_recipe_of_two_runs_repeats_both(named: Path, tmp_path: Path) -> None:
    """The toolkit numbers the stages of such a recipe so that it skips them when it reads them."""
    compress(named, pruning(), output_dir=str(tmp_path / "pruned"))
    model = load(tmp_path / "pruned")
    compress(model, QuantizationModifier(**W4_GROUP_64), output_dir=str(tmp_path / "two"))
    compress(named, str(tmp_path / "two" / "recipe.yaml"), output_dir=str(tmp_path / "one"))
    found, expected = (Manifest.from_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert found is not None
    assert expected is not None
    assert found.widths == expected.widths
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]
