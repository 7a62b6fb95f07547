"""``torch.save``, ``pickle`` and their copies of pruned models: the same logits, and the same checkpoint.

Field case 2.7: copies of a model, here those that a file or another process gets.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload.module import offload_module
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from tests.checkpoint.runs import FP8, aligned, logits, prune, source, tensors
from tests.tiny import add_tokenizer, listed_model, save_model, seeing_config, token_batches

pytestmark = pytest.mark.slow

QUANTIZERS: dict[str, Any] = {"16bit": False, "w4a16": True, "fp8": FP8}
KINDS = [f"{name}.{kind}" for name in QUANTIZERS for kind in ("oneshot", "load")]
# without the package's other imports, as a user's program that opens such a file
READER = """
import sys
from pathlib import Path
import torch
place, *kinds = sys.argv[1:]
ids = torch.load(f"{place}/ids.pt")
for kind in kinds:
    model = torch.load(f"{place}/{kind}.pt", weights_only=False)
    model.save_pretrained(f"{place}/other/{kind}")
    with torch.no_grad():
        torch.save(model(ids).logits, f"{place}/{kind}.logits")
"""


def saved(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def files(checkpoint: Path) -> dict[str, Any]:
    """Contents of all files; score files have their metadata in no order."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if name == SCORES_NAME:
            scores, provenance = load_scores(path)
            found[name] = [str(vars(scores)), provenance]
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six models, saved by both ways here, and opened and saved in another process."""
    place = tmp_path_factory.mktemp("pickling")
    path = source(place / "source")
    torch.save(torch.arange(2, 26).reshape(2, 12), place / "ids.pt")
    for name, quantize in QUANTIZERS.items():
        for kind in ("oneshot", "load"):
            model = prune(path, place / name, quantize=quantize) if kind == "oneshot" else load(place / name)
            torch.save(model, place / f"{name}.{kind}.pt")
            model.save_pretrained(place / "own" / f"{name}.{kind}")
            with torch.no_grad():
                torch.save(model.eval()(torch.load(place / "ids.pt")).logits, place / f"{name}.{kind}.expected")
    subprocess.run([sys.executable, "-c", READER, str(place), *KINDS], check=True, capture_output=True)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_another_process(place: Path, kind: str) -> None:
    own, other = files(place / "own" / kind), files(place / "other" / kind)
    assert own.keys() == other.keys()
    assert [name for name in own if own[name] != other[name]] == []
    expected, found = torch.load(place / f"{kind}.expected"), torch.load(place / f"{kind}.logits")
    # weights in a mapped file are not aligned, which changes the last bit of products
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def opened(family: str, directory: Path) -> PreTrainedModel:
    """A random model of a family, written and opened by its class."""
    if family == "seeing":
        config = seeing_config()
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory)
    elif family == "listed":
        listed_model().save_pretrained(directory)
        model = type(listed_model()).from_pretrained(directory)
    else:
        model = AutoModelForCausalLM.from_pretrained(save_model(directory, family, num_hidden_layers=2))
    add_tokenizer(directory)
    return linearize_moe(model).eval()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "listed", "seeing"])
def test_families(tmp_path: Path, family: str) -> None:
    """Families whose experts the toolkit has classes for, have other names in files, or are in a list."""
    model = opened(family, tmp_path / "source")
    # the toolkit looks for a processor of images
    processor = PreTrainedTokenizerFast.from_pretrained(tmp_path / "source")
    model = prune(model, quantize=family == "mixtral", sparsity=0.2, processor=processor, trust_remote_code_model=True)
    again = saved(model)
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(logits(again), logits(model))
    for each, name in ((model, "own"), (again, "other")):
        each.save_pretrained(tmp_path / name / "out")
    assert tensors(tmp_path / "other" / "out").keys() == tensors(tmp_path / "own" / "out").keys()
    assert files(tmp_path / "other" / "out") == files(tmp_path / "own" / "out")


@pytest.fixture(scope="module", params=QUANTIZERS)
def written(request: pytest.FixtureRequest, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("out") / "checkpoint"
    return output, prune(qwen, output, quantize=QUANTIZERS[request.param])


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_the_model_is_not_changed(written: Any, protocol: int) -> None:
    """Also if it was saved and has not run since, so that its weights are compressed."""
    _, model = written
    if any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters()):
        pytest.skip("pickle without torch.save does not take such tensors")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    again = pickle.loads(pickle.dumps(model, protocol))
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert all(vars(module)[key] is value for key, value in before[name].items()), name
    pickled_twice = pickle.loads(pickle.dumps(again, protocol))
    for each in (again, pickled_twice):
        assert torch.equal(logits(each), logits(copy.deepcopy(model)))


def test_copies_are_made_as_before(written: Any) -> None:
    _, model = written
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    for module, copied in zip(model.modules(), deep.modules(), strict=True):
        assert type(module) is type(copied)
        assert vars(module).keys() == vars(copied).keys()
    assert all(vars(shallow)[key] is value for key, value in vars(model).items())
    assert torch.equal(logits(deep), logits(model))


def test_models_within_other_objects(written: Any, tmp_path: Path) -> None:
    """With an optimizer whose parameters are those of the model, and an average; both go on."""
    model = aligned(load(written[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(2, 34).reshape(2, 16)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": AveragedModel(model)}
    again = pickle.loads(pickle.dumps(objects))
    assert again["optimizer"].param_groups[0]["params"][0] is next(again["model"].parameters())
    for each in (objects, again):
        each["model"](input_ids=ids, labels=ids).loss.backward()
        each["optimizer"].step()
        each["average"].update_parameters(each["model"])
        each["average"].module.save_pretrained(tmp_path / str(each is again))
    assert torch.equal(logits(again["model"]), logits(model))
    assert_equal(tensors(tmp_path / "True"), tensors(tmp_path / "False"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_parts_that_refer_to_the_model(written: Any) -> None:
    model = load(written[0])
    model.get_input_embeddings().owner = [model]
    again = saved(model)
    assert again.get_input_embeddings().owner[0] is again


def test_unpruned_models_of_the_class_are_pickled_as_before(written: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    unpruned = type(written[1]).from_pretrained(path)
    pickled = pickle.dumps(unpruned)
    assert b"moe_coverage_plugin.checkpoint" not in pickled
    assert torch.equal(logits(pickle.loads(pickled)), logits(unpruned))


def test_weights_on_disk(written: Any, tmp_path: Path) -> None:
    model = load(written[0])
    linear = model.get_output_embeddings()
    offload_module(linear, "cpu", "disk", offload_dir=str(tmp_path))
    with pytest.raises(CoverageError, match=r"weights are on disk.*: use save_pretrained"):
        pickle.dumps(model)


def test_a_model_that_is_saved_again_still_runs(written: Any, tmp_path: Path) -> None:
    """The toolkit adds a hook that decompresses the weights for each save."""
    path, model = written
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
    expected = logits(saved(model))
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)
    assert_equal(tensors(tmp_path / "two"), tensors(path))


def test_the_recipe_is_that_of_the_model(qwen: Path, tmp_path: Path) -> None:
    """Also if another model went through the toolkit since, and if the model was quantized in a later run."""
    first = prune(qwen, tmp_path / "first", sparsity=0.3)
    copied = copy.deepcopy(first)
    prune(qwen, tmp_path / "second", sparsity=0.5)
    for model, name in ((first, "again"), (copied, "copied"), (saved(first), "pickled")):
        model.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "recipe.yaml").read_text() == (tmp_path / "first" / "recipe.yaml").read_text()
    opened = load(tmp_path / "first")
    recipe = [QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=FP8["ignore"])]
    oneshot(model=opened, dataset=token_batches(samples=2), recipe=recipe)
    again = saved(opened)
    opened.save_pretrained(tmp_path / "quantized")
    prune(qwen, tmp_path / "third")
    again.save_pretrained(tmp_path / "quantized again")
    written = (tmp_path / "quantized" / "recipe.yaml").read_text()
    assert "QuantizationModifier" in written
    assert "sparsity: 0.3" in written
    assert (tmp_path / "quantized again" / "recipe.yaml").read_text() == written
    report = json.loads((tmp_path / "quantized again" / "moe_coverage_report.json").read_text())
    assert report == json.loads((tmp_path / "quantized" / "moe_coverage_report.json").read_text())
