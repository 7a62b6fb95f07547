"""``moe-coverage oneshot`` on text that the model writes itself, alone or mixed with text of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from llmcompressor import oneshot

from moe_coverage_plugin import CoverageError, Manifest, load_scores, sample_text
from moe_coverage_plugin.calibration.calibration_set import data_hash
from moe_coverage_plugin.cli import calibration_data
from moe_coverage_plugin.manifest import SCORES_NAME
from tests.calibration.brute_force import open_stock
from tests.modifiers import harness
from tests.tiny import add_tokenizer, save_model

pytestmark = pytest.mark.slow

SEQUENCE, SAMPLES = 16, 5
PRUNE = ["--recipe", "fisher_p50", "--recipe-args", "block_size=64", "reconstruct=false", "pictures=false"]
SIZES = ["--samples", SAMPLES, "--sequence-length", SEQUENCE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_model(
        tmp_path_factory.mktemp("own") / "model", dtype=torch.float32, num_hidden_layers=2, moe_intermediate_size=128
    )
    return add_tokenizer(source)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{20 + number % 40}" for number in range(4 * SEQUENCE)))
    return path


def stopped(done: Any, words: str) -> bool:
    """Whether a command ended with an error, its last line; before it are bars of the loader."""
    last = done.err.splitlines()[-1]
    return done.status == 2 and last.startswith("moe-coverage: ") and words in last


def measured_on(output: Path) -> dict[str, Any]:
    return load_scores(output / SCORES_NAME)[1]


def test_the_model_writes_the_text_if_none_is_given(script: Any, model: Path, tmp_path: Path) -> None:
    # first, because the command changes how this process opens models
    own = sample_text(open_stock(model, linear=True), samples=SAMPLES, length=SEQUENCE, seed=3)
    done = script("oneshot", model, *PRUNE, *SIZES, "--seed", 3, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    found = measured_on(tmp_path / "out")
    assert found["calibration_sha256"] == data_hash([{"input_ids": torch.tensor(own["input_ids"])}])
    written = found["calibration_text"]
    assert written["text"] == "written by the model itself"
    assert (written["seed"], written["samples"], written["length"]) == (3, SAMPLES, SEQUENCE)


def test_python_takes_the_path_of_the_model(model: Path) -> None:
    options = {"samples": SAMPLES, "length": SEQUENCE, "seed": 3}
    expected = sample_text(open_stock(model, linear=True), **options)
    assert sample_text(str(model), **options)["input_ids"] == expected["input_ids"]
    assert sample_text(model, **options).info.description == expected.info.description


def test_a_path_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="is not a model directory"):
        sample_text(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (["recommended_p50", "--recipe-args", "sparsty=0.5"], "did you mean sparsity"),
        (["recommended_p50_q4", "--recipe-args", "scheme=W8A16"], "edit the recipe for those of a quantizer"),
        (["recommended_p50", "--recipe-args", "block_size=100"], "block size 100 does not divide the 128 channels"),
        (["recommended_p50_q4", "--recipe-args", "block_size=64"], "widths will be multiples of 64"),
        (["ORDER"], "CoverageModifier needs AttributionModifier before it in the recipe, which is missing"),
    ],
)
def test_mistakes_are_found_before_the_model_writes(
    script: Any, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, recipe: list[str], words: str
) -> None:
    monkeypatch.setattr(calibration_data, "sample_text", lambda *_, **__: pytest.fail("the model wrote"))
    if recipe == ["ORDER"]:
        path = tmp_path / "recipe.yaml"
        modifiers = "{CoverageModifier: {sparsity: 0.5}, ChannelPruningModifier: {}}"
        path.write_text(f"prune_stage: {{prune_modifiers: {modifiers}}}")
        recipe = [str(path)]
    assert stopped(script("oneshot", model, "--recipe", *recipe, *SIZES, "--output", tmp_path / "out"), words)
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.yaml"}


def test_a_pruned_model_is_found_before_it_writes(
    script: Any, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    assert script("oneshot", model, *PRUNE, *SIZES, "--data", text, "--output", tmp_path / "out").status == 0
    monkeypatch.setattr(calibration_data, "sample_text", lambda *_, **__: pytest.fail("the model wrote"))
    done = script("oneshot", tmp_path / "out", *PRUNE, *SIZES, "--output", tmp_path / "again")
    assert stopped(done, "was pruned already")


def test_own_text_and_files_get_half_of_the_windows_each(script: Any, model: Path, text: Path, tmp_path: Path) -> None:
    done = script("oneshot", model, *PRUNE, *SIZES, "--data", "own", text, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    found = measured_on(tmp_path / "out")
    own, files = found["calibration_text"]["parts"]
    assert own["samples"] == 3
    assert files == {"text": "files", "names": ["text.txt"]}
    assert found["calibration_batches"] == SAMPLES


def test_a_file_of_own_text_keeps_its_provenance(script: Any, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    assert script("sample", model, "--output", own, "--samples", SAMPLES, "--length", SEQUENCE).status == 0
    done = script("oneshot", model, *PRUNE, *SIZES, "--data", own, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    written = measured_on(tmp_path / "out")["calibration_text"]
    assert written["names"] == ["own.jsonl"]
    assert written["provenance"] == json.loads(own.read_text().splitlines()[0])["provenance"]


def test_a_pruned_model_writes_the_text_that_quantizes_it(script: Any, model: Path, tmp_path: Path) -> None:
    """Its experts have several widths."""
    done = script("oneshot", model, *PRUNE, *SIZES, "--output", tmp_path / "pruned")
    assert done.status == 0, done.err
    assert len({width for layer in widths(tmp_path / "pruned") for width in layer}) > 1
    quantizer = {"GPTQModifier": harness.W4_GROUP_64}
    (tmp_path / "q4.yaml").write_text(json.dumps({"q_stage": {"q_modifiers": quantizer}}))
    recipe = ["--recipe", tmp_path / "q4.yaml"]
    done = script("oneshot", tmp_path / "pruned", *recipe, *SIZES, "--output", tmp_path / "q4")
    assert done.status == 0, done.err
    assert widths(tmp_path / "q4") == widths(tmp_path / "pruned")


def widths(checkpoint: Path) -> list[list[int]]:
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    return list(manifest.widths.values())


def test_own_text_and_a_data_set_of_other_windows(
    script: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error before the model writes, which can take long."""
    monkeypatch.setattr(calibration_data, "sample_text", lambda *_, **__: pytest.fail("the model wrote"))
    Dataset.from_dict({"input_ids": [[5] * 9] * 4}).save_to_disk(tmp_path / "saved")
    done = script("oneshot", model, *PRUNE, *SIZES, "--data", "own", tmp_path / "saved", "--output", tmp_path / "out")
    assert done.status == 2
    assert "samples of 9 tokens" in done.err
    assert "give --sequence-length 9" in done.err
    assert not (tmp_path / "out").exists()


def test_windows_of_files_beside_own_text_fit_the_context(script: Any, text: Path, tmp_path: Path) -> None:
    source = save_model(
        tmp_path / "short", num_hidden_layers=1, moe_intermediate_size=128, max_position_embeddings=SEQUENCE
    )
    command = ["oneshot", add_tokenizer(source), *PRUNE, "--samples", 4, "--batch-size", 4, "--data", "own", text]
    longer = script(*command, "--sequence-length", 2 * SEQUENCE, "--output", tmp_path / "out")
    assert stopped(longer, f"has {SEQUENCE} tokens: give at most {SEQUENCE}")
    done = script(*command, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert load_scores(tmp_path / "out" / SCORES_NAME)[0].tokens_LE.sum(-1).tolist() == [4 * SEQUENCE * 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "own", "own"], "--data has own 2 times: give it once"),
        (["--data", "own", "FILE", "--samples", 1], "--samples is 1, but own and files need at least 2"),
        (["--data", "own", "absent.txt"], "--data absent.txt does not exist"),
    ],
)
def test_mistakes(script: Any, model: Path, text: Path, tmp_path: Path, arguments: list[object], words: str) -> None:
    arguments = [text if each == "FILE" else each for each in arguments]
    done = script("oneshot", model, *PRUNE, *arguments, "--output", tmp_path / "out")
    assert done.status == 2
    assert words in done.err


def test_a_model_without_tokenizer_cannot_write(script: Any, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", num_hidden_layers=1, moe_intermediate_size=128)
    done = script("oneshot", source, *PRUNE, "--output", tmp_path / "out")
    assert done.status == 2
    assert "has no tokenizer: copy the files of one to it" in done.err


def test_the_text_of_python_is_in_the_scores(model: Path, tmp_path: Path) -> None:
    opened = open_stock(model, linear=True)
    data = sample_text(opened, samples=SAMPLES, length=SEQUENCE)
    oneshot(model=opened, dataset=data, recipe=harness.pruning(pictures=False), output_dir=str(tmp_path / "out"))
    assert measured_on(tmp_path / "out")["calibration_text"] == json.loads(data.info.description)
