"""Saving says what is there: ``save_pretrained``, ``load`` and ``save_pretrained`` again give the same checkpoint.

Real checkpoints of three families with configs as they are published: nested ones, with a dtype in several places, and
with layers that predict several tokens.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.files.integrity import check_checkpoint
from tests.checkpoint.runs import config_json, prune, source, tensors
from tests.checkpoint.test_mtp import with_mtp
from tests.tiny import LISTED, VOCAB, add_tokenizer, diversify, save_model, seeing_config

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe text", "deepseek_v3", "qwen3_next")
PLACES = ("everywhere", "text_config", "torch_dtype", "nowhere")
# of the object or the file, not of the model
OF_FILES = ("_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config", "moe_coverage")


def put_dtype(config: dict[str, Any], place: str) -> None:
    """Leave the dtype in one place of a config, as published and old files do."""
    parts = [config, *(part for key, part in config.items() if key in ("text_config", "vision_config"))]
    name = config["dtype"]
    for part in parts:
        part.pop("dtype", None)
    if place == "everywhere":
        for part in parts:
            part["dtype"] = name
    elif place == "text_config":
        config.get("text_config", config)["dtype"] = name
    elif place == "torch_dtype":
        config["torch_dtype"] = name


def make_source(directory: Path, family: str, place: str, dtype: str) -> Path:
    if family == "qwen3_next":
        path, _ = with_mtp(directory, family, fused=False)
        stored = {
            name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path / "model.safetensors").items()
        }
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    elif family == "deepseek_v3":
        path = source(directory, family, getattr(torch, dtype))
    else:
        torch.manual_seed(0)
        config = seeing_config(family.partition(" ")[0], num_hidden_layers=2)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        diversify(model)
        model.to(getattr(torch, dtype)).save_pretrained(directory)
        path = add_tokenizer(directory)
    config = config_json(path) | {"of_another_program": {"kept": True}, "dtype": dtype}
    put_dtype(config, place)
    (path / "config.json").write_text(json.dumps(config))
    return path


def options_of(path: Path, family: str) -> dict[str, Any]:
    if family == "deepseek_v3":
        return {"sparsity": 0.2}
    # the toolkit looks for a processor of images otherwise
    return {"processor": AutoTokenizer.from_pretrained(path)}


def open_source(path: Path, family: str) -> Path | PreTrainedModel:
    """A path, which the toolkit opens as text alone, or for a model that sees as a whole the model."""
    return AutoModelForImageTextToText.from_pretrained(path) if family == "qwen3_vl_moe" else path


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str, str], Path]:
    """Pruned checkpoints, made when they are first needed."""

    @cache
    def write(family: str, place: str) -> Path:
        directory = tmp_path_factory.mktemp("written")
        path = make_source(directory / "source", family, place, "bfloat16")
        prune(open_source(path, family), directory / "out", **options_of(path, family))
        return directory / "out"

    return write


def described(model: PreTrainedModel) -> dict[str, Any]:
    return comparable(model.config.to_dict())


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the model; layers that predict several tokens are not saved."""
    return {
        key: comparable(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in OF_FILES and not str(key).startswith("_") and "mtp" not in str(key) and "nextn" not in str(key)
    }


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def resize(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCAB + 9)


def rotate_faster(model: PreTrainedModel) -> None:
    text_config(model).rope_parameters = text_config(model).rope_parameters | {"rope_theta": 54321.0}


def generate_otherwise(model: PreTrainedModel) -> None:
    model.generation_config.update(do_sample=True, temperature=0.3, eos_token_id=[1, 7])


EDITS: dict[str, Callable[[PreTrainedModel], object]] = {
    "vocabulary": resize,
    "rope": rotate_faster,
    "generation": generate_otherwise,
    "experts per token": lambda model: setattr(text_config(model), "num_experts_per_tok", 1),
    "positions": lambda model: setattr(text_config(model), "max_position_embeddings", 4321),
    "end": lambda model: setattr(text_config(model), "eos_token_id", [1, 5]),
    "field of another program": lambda model: setattr(model.config, "of_yet_another", {"kept": [1, 2]}),
    "dtype": lambda model: model.to(torch.float16),
}


def assert_equal_models(one: PreTrainedModel, other: PreTrainedModel) -> None:
    assert described(one) == described(other)
    assert one.generation_config.to_diff_dict() == other.generation_config.to_diff_dict()
    state, others = one.state_dict(), other.state_dict()
    assert state.keys() == others.keys()
    for name, tensor in state.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


def assert_equal_files(one: Path, other: Path) -> None:
    for name in ("config.json", "generation_config.json", "moe_coverage_report.json"):
        assert json.loads((one / name).read_text()) == json.loads((other / name).read_text()), name
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    stored, others = tensors(one), tensors(other)
    assert stored.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in stored.items())


# without shrinking, which would save models for minutes
@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    family=st.sampled_from(FAMILIES),
    place=st.sampled_from(PLACES),
    edits=st.sets(st.sampled_from(sorted(EDITS)), max_size=4),
    copied=st.booleans(),
    shards=st.sampled_from(["400KB", "10GB"]),
    beside=st.booleans(),
)
def test_save_load_save(written, tmp_path_factory, family, place, edits, copied, shards, beside):
    """Field cases 2.1, 2.2, 2.5, 2.6 and 2.7 with one another: the second checkpoint is the first."""
    tmp_path = tmp_path_factory.mktemp("round")
    model = load(written(family, place))
    if copied:
        original, model = model, copy.deepcopy(model)
    for edit in sorted(edits):
        EDITS[edit](model)
    for name in ("one", "two"):
        if beside:
            (tmp_path / name / "checkpoint-1").mkdir(parents=True)
            (tmp_path / name / "training_args.bin").write_text("mine")
            add_tokenizer(tmp_path / name)
    model.save_pretrained(tmp_path / "one", max_shard_size=shards)
    again = load(tmp_path / "one")
    assert_equal_models(again, model)
    assert again.config.dtype == again.dtype == (torch.float16 if "dtype" in edits else torch.bfloat16)
    again.save_pretrained(tmp_path / "two", max_shard_size=shards)
    assert_equal_files(tmp_path / "one", tmp_path / "two")
    manifest = Manifest.from_checkpoint(tmp_path / "two")
    assert manifest is not None
    check_checkpoint(tmp_path / "two", manifest)
    config = config_json(tmp_path / "two")
    assert config["of_another_program"] == {"kept": True}
    assert config["dtype"] == str(model.dtype).removeprefix("torch.")
    if copied:
        assert_equal_models(original, load(written(family, place)))


# every family, and every place with a nested config and without
@pytest.mark.parametrize(
    ("family", "place"),
    [
        *product(("qwen3_vl_moe", "qwen3_next"), PLACES),
        ("qwen3_5_moe text", "text_config"),
        ("deepseek_v3", "torch_dtype"),
    ],
)
def test_places_of_the_dtype(written, family, place):
    """Field case 2.2: our output opens with the dtype of the weights, whatever the source's config says of it."""
    path = written(family, place)
    config = config_json(path)
    assert config["dtype"] == "bfloat16"
    assert ("text_config" in config) == family.startswith(("qwen3_vl", "qwen3_5"))
    assert {tensor.dtype for name, tensor in tensors(path).items() if name.endswith("proj.weight")} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(path).dtype == torch.bfloat16
    assert load(path).dtype == torch.bfloat16
    # checkpoints of earlier releases
    for missing in ("nowhere", "text_config"):
        edited = copy.deepcopy(config)
        put_dtype(edited, missing)
        edited.pop("torch_dtype", None)
        copied = path.with_name(f"{missing}_copy")
        copied.mkdir(exist_ok=True)
        for file in path.glob("*.safetensors"):
            (copied / file.name).unlink(missing_ok=True)
            (copied / file.name).hardlink_to(file)
        (copied / "config.json").write_text(json.dumps(edited))
        assert load(copied).config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "edits"),
    [
        *((family, sorted(EDITS)) for family in FAMILIES),
        (FAMILIES[0], ["vocabulary"]),
        (FAMILIES[2], ["end", "positions"]),
    ],
)
def test_edits_before_the_run(tmp_path, family, edits):
    """Field case 2.6: of a model that is given to oneshot."""
    path = make_source(tmp_path / "source", family, "everywhere", "float32")
    opener = AutoModelForImageTextToText if family == "qwen3_vl_moe" else AutoModelForCausalLM
    model = opener.from_pretrained(path)
    for edit in edits:
        EDITS[edit](model)
    expected = described(model)
    prune(model, tmp_path / "out", **options_of(path, family))
    opened = load(tmp_path / "out")
    assert described(opened) == expected
    assert opened.get_input_embeddings().weight.shape[0] == (VOCAB + 9 if "vocabulary" in edits else VOCAB)
    model.save_pretrained(tmp_path / "in_memory")
    assert_equal_files(tmp_path / "out", tmp_path / "in_memory")


def test_former_spellings_do_not_contradict(tmp_path):
    """Field case 2.6: rope_theta and rope_scaling of an old file, whose values were changed since."""
    path = source(tmp_path / "source")
    config = config_json(path)
    config.pop("rope_parameters")
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0, "rope_scaling": None}))
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    prune(model, tmp_path / "out")
    assert config_json(tmp_path / "out")["rope_theta"] == 5000.0, "unchanged, so in the spelling of the source"
    opened = load(tmp_path / "out")
    rotate_faster(opened)
    opened.save_pretrained(tmp_path / "edited")
    written = config_json(tmp_path / "edited")
    assert "rope_theta" not in written
    assert written["rope_parameters"]["rope_theta"] == 54321.0
    assert load(tmp_path / "edited").config.rope_parameters["rope_theta"] == 54321.0


def test_a_source_that_is_gone(tmp_path):
    """Field case 2.6: or was replaced by another model since; the config is that of the model in memory."""
    model = prune(source(tmp_path / "source"))
    model.save_pretrained(tmp_path / "one")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    model.save_pretrained(tmp_path / "two")
    (tmp_path / "source" / "config.json").write_text("damaged")
    model.save_pretrained(tmp_path / "three")
    (tmp_path / "source" / "config.json").unlink()
    model.save_pretrained(tmp_path / "four")
    shutil.rmtree(tmp_path / "source")
    model.save_pretrained(tmp_path / "five")
    for name in ("two", "three", "four", "five"):
        assert_equal_models(load(tmp_path / name), load(tmp_path / "one"))
        assert "llama" not in (tmp_path / name / "config.json").read_text()


def test_tied_embeddings_that_are_resized_and_untied(tmp_path):
    """Field case 2.6: in models that were loaded."""
    prune(source(tmp_path / "source", tie_word_embeddings=True), tmp_path / "out")
    resized = load(tmp_path / "out")
    resized.resize_token_embeddings(VOCAB + 9)
    resized.save_pretrained(tmp_path / "resized")
    again = load(tmp_path / "resized")
    assert again.config.tie_word_embeddings
    assert_equal_models(again, resized)
    untied = load(tmp_path / "out")
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach() * 2)
    untied.save_pretrained(tmp_path / "untied")
    again = load(tmp_path / "untied")
    assert not again.config.tie_word_embeddings
    assert torch.equal(again.lm_head.weight, 2 * again.model.embed_tokens.weight)


def test_settings_that_transformers_does_not_save(tmp_path):
    """Field case 2.6: a generation config that contradicts itself stops a run before calibration."""
    model = AutoModelForCausalLM.from_pretrained(source(tmp_path / "source"))
    model.generation_config.temperature = 0.5
    with pytest.raises(CoverageError, match=r"saves no generation_config .*temperature.*: change model\.generation"):
        prune(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fields_of_code_beside_a_model(tmp_path):
    """Field case 2.6: a family that transformers does not have, with its own config class and fields."""
    path = add_tokenizer(save_model(tmp_path / "source", LISTED, moe_intermediate_size=128))
    (path / "config.json").write_text(json.dumps(config_json(path) | {"of_another_program": {"kept": True}}))
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    model.config.num_experts_per_tok = 1
    prune(model, tmp_path / "out", trust_remote_code_model=True, processor=AutoTokenizer.from_pretrained(path))
    opened = load(tmp_path / "out", trust_remote_code=True)
    assert opened.config.num_experts_per_tok == 1
    opened.config.max_position_embeddings = 99
    opened.save_pretrained(tmp_path / "again")
    config = config_json(tmp_path / "again")
    assert config["auto_map"] == config_json(path)["auto_map"]
    assert config["of_another_program"] == {"kept": True}
    assert list((tmp_path / "again").glob("*.py"))
    again = load(tmp_path / "again", trust_remote_code=True)
    assert (again.config.num_experts_per_tok, again.config.max_position_embeddings) == (1, 99)
