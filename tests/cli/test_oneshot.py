"""``moe-coverage oneshot`` writes what oneshot in Python does; errors come before calibration, in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload import load as offload_load
from datasets import Dataset, DatasetDict
from llmcompressor import oneshot
from safetensors.torch import load_file
from transformers import conversion_mapping, monkey_patching

from moe_coverage_plugin import Manifest
from moe_coverage_plugin.checkpoint import opening
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from tests.checkpoint.runs import tensors
from tests.modifiers import harness
from tests.tiny import add_tokenizer, save_model

pytestmark = pytest.mark.slow

SEQUENCE = 16
TEXT = " ".join(f"w{(7 * number) % 40 + 20}" for number in range(3 * SEQUENCE * 8))


@contextmanager
def in_a_process_of_its_own() -> Iterator[None]:
    """Undo patches of the toolkit, and restore the modules that are unloaded without torchvision."""
    modules = dict(sys.modules)
    conversion_mapping.get_checkpoint_conversion_mapping("")  # builds it
    mapping = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    yield
    sys.modules.update(modules)
    conversion_mapping._checkpoint_conversion_mapping_cache = mapping
    monkey_patching.clear_patch_mapping()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with in_a_process_of_its_own():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(harness.save_tiny(tmp_path_factory.mktemp("oneshot") / "model"))


@pytest.fixture(scope="module")
def recipe(model: Path) -> Path:
    path = model.with_name("recipe.yaml")
    path.write_text(harness.YAML)
    return path


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.with_name("text.txt")
    path.write_text(TEXT)
    return path


@pytest.fixture
def command(model: Path, recipe: Path, text: Path, tmp_path: Path) -> Any:
    """Valid arguments, with changes; ``None`` leaves an option out."""

    def build(model: object = model, **changes: Any) -> list[object]:
        options = {"recipe": recipe, "data": text, "samples": 4, "sequence-length": SEQUENCE, "batch-size": 2}
        options |= {"output": tmp_path / "out"} | changes
        pairs = ((f"--{name}", *(value if isinstance(value, list) else [value])) for name, value in options.items())
        return ["oneshot", model, *(part for pair in pairs if pair[1] is not None for part in pair)]

    return build


def windows(text: str, samples: int) -> Dataset:
    """Token ids in windows: the word ``w5`` is token 5, and 1 ends a document."""
    ids = torch.tensor([*(int(word[1:]) for word in text.split()), 1])
    rows = ids[: len(ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)
    rows = rows[torch.linspace(0, len(rows) - 1, min(samples, len(rows))).long()]
    return Dataset.from_dict({"input_ids": rows.tolist()})


def quantizers(name: str, **options: Any) -> str:
    """A recipe of one quantizer alone."""
    return json.dumps({"q_stage": {"q_modifiers": {name: options}}})


def in_python(model: Path, recipe: Path, data: Dataset, output: Path, **options: Any) -> None:
    oneshot(
        model=str(model),
        recipe=str(recipe),
        dataset=data,
        batch_size=2,
        shuffle_calibration_samples=False,
        output_dir=str(output),
        **options,
    )


def same_weights(one: Path, other: Path) -> bool:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_writes_what_python_writes(script: Any, command: Any, model: Path, recipe: Path, tmp_path: Path) -> None:
    in_python(model, recipe, windows(TEXT, 4), tmp_path / "python")
    done = script(*command())
    assert done.status == 0, done.err
    assert f"Wrote {tmp_path / 'out'}" in done.out
    assert same_weights(tmp_path / "out", tmp_path / "python")
    assert {"README.md", "recipe.yaml", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("place", ["disk", "auto_offload"])
def test_weights_on_disk(
    script: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The checkpoint is that of the model in memory, and nothing is left beside it."""
    # a machine that holds about one layer
    monkeypatch.setattr(offload_load, "_get_cpu_memory", lambda *_: {"cpu": 3_000_000})
    outputs = [tmp_path / "memory", tmp_path / "offloaded"]
    with in_a_process_of_its_own():
        assert script(*command(output=outputs[0])).status == 0
    with in_a_process_of_its_own():
        done = script(*command(output=outputs[1], **{"device-map": place}))
    assert done.status == 0, done.err[-2000:]
    # weights on disk are written in more than one file
    memory, offloaded = map(tensors, outputs)
    assert memory.keys() == offloaded.keys()
    assert all(torch.equal(offloaded[name], memory[name]) for name in memory)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["memory", "offloaded"]


def test_weights_that_do_not_fit_in_host_memory(
    script: Any, command: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "free_host_memory", lambda: 2**20)
    done = script(*command(output=tmp_path / "out"))
    assert done.status == 2
    message = f"the weights of {model} take 0.0 GiB, and 0.0 GiB of host memory are free: give --device-map auto_off"
    assert message in done.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_json_lines_and_several_files(script: Any, command: Any, text: Path, tmp_path: Path) -> None:
    """Each line and each text file is a document, which ends with an end token."""
    lines = [" ".join(TEXT.split()[start : start + SEQUENCE - 1]) for start in range(0, 4 * SEQUENCE, SEQUENCE)]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in lines))
    more = {"data": [tmp_path / "lines.jsonl"], "text-field": "body", "samples": 99, "output": tmp_path / "lines"}
    assert script(*command(**more)).status == 0
    scores, provenance = load_scores(tmp_path / "lines" / SCORES_NAME)
    # two windows a batch, every token to two experts
    assert provenance["calibration_batches"] == 2
    assert scores.tokens_LE.sum(-1).tolist() == [4 * SEQUENCE * 2] * 2
    assert script(*command(data=[text, text], samples=99, **{"batch-size": 16})).status == 0
    scores, provenance = load_scores(tmp_path / "out" / SCORES_NAME)
    count = 2 * (len(TEXT.split()) + 1) // SEQUENCE
    assert provenance["calibration_batches"] == count // 16
    assert scores.tokens_LE.sum(-1).tolist() == [count * SEQUENCE * 2] * 2


@pytest.mark.parametrize("kind", ["text", "input_ids"])
def test_saved_data_sets(script: Any, command: Any, model: Path, recipe: Path, tmp_path: Path, kind: str) -> None:
    data = windows(TEXT, 6)
    saved = data if kind == "input_ids" else Dataset.from_dict({"text": [TEXT]})
    saved.save_to_disk(tmp_path / "saved")
    in_python(model, recipe, data, tmp_path / "python")
    assert script(*command(data=tmp_path / "saved", samples=6)).status == 0
    assert same_weights(tmp_path / "out", tmp_path / "python")


def test_recipes_by_name_and_their_arguments(script: Any, command: Any, tmp_path: Path) -> None:
    changes = {"recipe": "fisher_p50", "recipe-args": ["sparsity=0.25", "block_size=64", "reconstruct=false"]}
    assert script(*command(**changes)).status == 0
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert sum(map(sum, manifest.widths.values())) == 2 * 8 * 256 * 3 // 4
    assert manifest.block_size % 64 == 0


def test_a_pruned_checkpoint_is_quantized(script: Any, command: Any, pruned: Path, tmp_path: Path) -> None:
    (tmp_path / "q4.yaml").write_text(quantizers("QuantizationModifier", **harness.W4_GROUP_64))
    data = windows(TEXT, 4)
    data.save_to_disk(tmp_path / "saved")
    add_tokenizer(pruned)
    done = script(*command(pruned, recipe=tmp_path / "q4.yaml", data=tmp_path / "saved"))
    assert done.status == 0, done.err
    before, after = Manifest.from_checkpoint(pruned), Manifest.from_checkpoint(tmp_path / "out")
    assert before is not None
    assert after is not None
    assert after.widths == before.widths
    assert any(name.endswith("weight_packed") for name in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "W8A8"}, "GPTQModifier would give experts quantized activations"),
        ({"scheme": "W4A16", "targets": ["re:.*up_proj$"]}, "GPTQModifier quantizes 7 of 21 expert projections"),
        ({"scheme": "W4A16"}, "GPTQModifier has group_size 128, which does not divide the 192 input channels"),
    ],
)
def test_quantizers_that_do_not_fit_a_pruned_checkpoint(
    script: Any, command: Any, pruned: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    """An error before calibration, which can take hours."""
    recipe = tmp_path / "gptq.yaml"
    recipe.write_text(quantizers("GPTQModifier", **{"targets": ["Linear"], "ignore": ["lm_head"]} | options))
    add_tokenizer(pruned)
    done = script(*command(pruned, recipe=recipe))
    assert done.status == 2
    assert words in done.err.splitlines()[-1]
    assert "alibrating" not in done.err, "calibration had begun"
    assert not (tmp_path / "out").exists()


def test_only_selected_windows_become_lists(script: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python integers, text takes over ten times its bytes."""
    built: list[int] = []
    real = Dataset.from_dict

    def count(mapping: Any, *more: Any, **options: Any) -> Dataset:
        built.append(len(mapping["input_ids"]))
        return real(mapping, *more, **options)

    monkeypatch.setattr(Dataset, "from_dict", count)
    assert script(*command(samples=3)).status == 0
    assert built[0] == 3


def test_the_seed_is_kept(script: Any, command: Any, tmp_path: Path) -> None:
    assert script(*command(seed=7)).status == 0
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert manifest.provenance["torch_seed"] == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "no/such/place"}, "no/such/place is not a model directory (there is no such directory)"),
        ({"model": "."}, ". is not a model directory (it has no config.json)"),
        ({"recipe": "unknown"}, "there is no recipe 'unknown': known are coverage_p25_gptq"),
        ({"recipe": "BAD"}, "cannot be read"),
        ({"recipe": "EMPTY"}, "names no modifiers where llm-compressor looks for them"),
        ({"recipe": "STAGE"}, "skips because of these names: call them 'prune_stage' and 'a_modifiers'"),
        ({"recipe-args": ["sparsity"]}, "--recipe-args has 'sparsity': write NAME=VALUE"),
        ({"recipe-args": ["sparsity=["]}, "is not YAML"),
        ({"recipe-args": ["spasity=0.5"]}, "recipe_args spasity override nothing"),
        ({"recipe": "Q4", "recipe-args": ["scheme=W8A16"]}, "--recipe-args scheme change nothing in Q4"),
        (
            {"recipe-args": ["sparsity=1.5"]},
            "sparsity=1.5 of CoverageModifier must be a number, at least 0 and below 1",
        ),
        ({"recipe-args": ["sparsity=many"]}, "sparsity='many' of CoverageModifier must be a number"),
        ({"data": "absent.txt"}, "--data absent.txt does not exist"),
        ({"data": "SHORT"}, "has 4 tokens, fewer than one window of 16"),
        ({"data": "DIRECTORY"}, "is not a data set written by datasets.save_to_disk"),
        ({"data": "SPLITS"}, "has several splits: give one of them"),
        ({"data": ["DIRECTORY", "SHORT"]}, "give one data set, or files only"),
        ({"data": "LINES"}, "LINES.jsonl cannot be read as json"),
        ({"data": "CHAT"}, "has no text in 'text', only messages: make text of 'messages' by tokenizer.apply_chat"),
        ({"output": "."}, "is the current directory, which a complete checkpoint cannot replace"),
        ({"samples": 0}, "--samples is 0"),
        ({"sequence-length": -1}, "--sequence-length is -1"),
        ({"batch-size": 0}, "--batch-size is 0"),
        ({"device-map": "nowhere"}, "cannot be opened as a model"),
    ],
)
def test_mistakes_are_one_line_before_calibration(
    script: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stage = "prune: {a_modifiers: {CoverageModifier: {sparsity: 0.5}}}"
    chat = json.dumps({"messages": [{"role": "user", "content": "w2"}]})
    files = {"BAD": "a: [", "EMPTY": "a_stage: {}", "STAGE": stage, "SHORT": "w2 w3 w4"}
    for name, content in (files | {"LINES.jsonl": "no JSON", "CHAT.jsonl": chat}).items():
        Path(name).write_text(content)
    Path("Q4").write_text(quantizers("QuantizationModifier", **harness.W4_GROUP_64))
    Path("DIRECTORY").mkdir()
    DatasetDict({"train": windows(TEXT, 1)}).save_to_disk("SPLITS")
    known = {"LINES": "LINES.jsonl", "CHAT": "CHAT.jsonl"}
    changes = {name: known.get(value, value) if isinstance(value, str) else value for name, value in changes.items()}
    before = sorted(tmp_path.rglob("*"))
    done = script(*command(**changes))
    # libraries print their progress before
    *_, message = done.err.splitlines()
    assert (done.status, done.out.count("Wrote")) == (2, 0)
    assert message.startswith("moe-coverage: ")
    assert words in message
    assert "Observing" not in done.err, "calibration had begun"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_default_window_is_at_most_the_limit_of_the_model(script: Any, command: Any, tmp_path: Path) -> None:
    short = add_tokenizer(save_model(tmp_path / "short", num_hidden_layers=2, max_position_embeddings=32))
    assert (
        script(*command(short, **{"sequence-length": None, "recipe-args": ["block_size=32", "min_width=32"]})).status
        == 0
    )
    scores, _ = load_scores(tmp_path / "out" / SCORES_NAME)
    assert scores.tokens_LE.sum(-1).tolist() == [4 * 32 * 2] * 2
