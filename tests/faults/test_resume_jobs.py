"""A job that is killed goes on from what it finished, and its checkpoint is that of a job that was not killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_coverage_plugin import CoverageError, Manifest, load_scores
from moe_coverage_plugin.files import progress
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.manifest import CONFIG_KEY, SCORES_NAME
from tests import processes
from tests.checkpoint.runs import config_json, tensors
from tests.faults import resumed_runs
from tests.modifiers.harness import compress, open_linear, refusal, save_tiny
from tests.tiny import add_tokenizer

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LAYERS, BATCHES = 3, 3
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "vocab_size": 512}
COMPLETE = {"batch": BATCHES, "score": LAYERS, "fit": LAYERS, "quantize": LAYERS}
KILLED = -signal.SIGKILL
# is killed when it calls the function that its first argument names
COMMAND = """
import os, signal, sys
from moe_coverage_plugin.cli import calibration_data, compression, main

module, name = sys.argv[1].split(".")
setattr(globals()[module], name, lambda *_args, **_options: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    return add_tokenizer(save_tiny(directory, num_hidden_layers=LAYERS, **SHAPE))


def start(model: Path, output: Path, **order: Any) -> Any:
    order |= {"model": str(model), "output": str(output)}
    return processes.start("-m", "tests.faults.resumed_runs", json.dumps(order), cwd=REPOSITORY)


def job(model: Path, output: Path, **order: Any) -> dict[str, Any]:
    """A run in a process of its own, to its end: the work that it did, and what it logged."""
    program = start(model, output, **order)
    assert program.wait() == 0, program.stderr[-4000:]
    return json.loads(program.stdout.splitlines()[-1])


def work(done: dict[str, Any]) -> dict[str, int]:
    """How often a run did each kind of work."""
    return {kind: done["work"].get(kind, 0) for kind in COMPLETE}


def kill(model: Path, output: Path, kind: str, number: int, **order: Any) -> str:
    """A run that is killed before it does a kind of work for another time: what it logged."""
    program = start(model, output, kill=[kind, number], **order)
    assert program.wait() == KILLED, program.stderr[-4000:]
    assert not output.exists()
    return program.stderr


def described(checkpoint: Path) -> list[Any]:
    """The config and the entry of a checkpoint, without the seed of the process that wrote it."""
    config = config_json(checkpoint)
    entry = (config if CONFIG_KEY in config else config["quantization_config"]).pop(CONFIG_KEY, None)
    if entry is None:
        return [config]
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    manifest.provenance.pop("torch_seed")
    return [config, manifest]


def assert_equal(output: Path, expected: Path) -> None:
    """Two checkpoints are equal bit for bit, and nothing is left beside them."""
    assert described(output) == described(expected)
    one, other = tensors(output), tensors(expected)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (output.parent / f".{output.name}.progress").exists()


@pytest.fixture(scope="module")
def complete(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("complete") / "out"
    done = job(model, output)
    assert work(done) == COMPLETE
    assert not any("oing on" in message for message in done["messages"])
    assert sum("Progress is kept in" in message for message in done["messages"]) == 1
    return output


def test_goes_on_from_what_was_finished(model: Path, complete: Path, output: Path):
    done = job(model, output)
    assert work(done) == COMPLETE | {"batch": 0, "score": 0, "fit": 1, "quantize": 1}
    assert any("oing on" in message for message in done["messages"])
    assert_equal(output, complete)


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_run_that_is_killed_while_it_keeps_something(model: Path, complete: Path, tmp_path: Path, number: int):
    """The sums of two batches, the scores of the second layer, and the second layer that is pruned."""
    kill(model, tmp_path / "out", "write", number)
    assert list(tmp_path.glob(".out.progress/.*.partial"))
    done = job(model, tmp_path / "out")
    assert any("oing on" in message for message in done["messages"])
    left = {1: {"batch": 2}, 4: {"batch": 0, "score": 2}, 7: {"batch": 0, "score": 0, "fit": 2, "quantize": 2}}
    assert work(done) == COMPLETE | left[number]
    assert_equal(tmp_path / "out", complete)


def test_a_run_that_is_killed_while_a_thread_writes_the_layer_before(model: Path, complete: Path, tmp_path: Path):
    """The third layer is being fitted, and of the second one only half of a file is there."""
    kill(model, tmp_path / "out", "fit", 2, unwritten=7)
    assert len(list(tmp_path.glob(".out.progress/run.layers.*"))) == 1
    assert len(list(tmp_path.glob(".out.progress/.*.partial"))) == 1
    done = job(model, tmp_path / "out")
    assert work(done) == COMPLETE | {"batch": 0, "score": 0, "fit": 2, "quantize": 2}
    assert_equal(tmp_path / "out", complete)


@pytest.mark.parametrize("order", [{"quantizes": False}, {"only_quantizes": True}])
def test_a_last_layer_that_cannot_be_written_stops_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: dict[str, Any]
):
    def no_space(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        if f".{LAYERS - 1}.safetensors" in path.name:
            raise SafetensorError("No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(progress, "save_file", no_space)
    with pytest.raises(CoverageError, match=r"cannot be written \(No space left on device\)"):
        compress(open_linear(model), resumed_runs.recipe(order), output_dir=str(tmp_path / "out"))
    assert len(list(tmp_path.glob(".out.progress/run.layers.*"))) == LAYERS - 1
    assert not (tmp_path / "out").exists()


# --- what is not taken over


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Progress of a run with two finished layers."""
    directory = tmp_path_factory.mktemp("killed")
    kill(model, directory / "out", "fit", 2)
    return directory / ".out.progress"


@pytest.fixture
def output(killed: Path, tmp_path: Path) -> Path:
    """An output with this progress."""
    shutil.copytree(killed, tmp_path / ".out.progress")
    return tmp_path / "out"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("differs", ["recipe", "calibration data", "weights of the model", "versions", "all fields"])
def test_another_run_starts_from_the_beginning(model: Path, output: Path, differs: str):
    described = output.parent / ".out.progress" / "run.json"
    order: dict[str, Any] = {}
    match differs:
        case "recipe":
            order = {"sparsity": 0.25}
        case "calibration data":
            order = {"samples": 23}
        case "weights of the model":
            order = {"bfloat16": True}
        case "versions":
            change(described, torch.__version__, "1.0")
        case "all fields":
            described.unlink()
    log = kill(model, output, "batch", 0, **order)
    (message,) = (line for line in log.splitlines() if "of another run" in line)
    assert differs in message
    assert "oing on" not in log


def test_files_of_the_model_that_changed(model: Path, output: Path):
    (model / "notes.txt").touch()
    try:
        assert "(files of the model differ)" in kill(model, output, "batch", 0)
    finally:
        (model / "notes.txt").unlink()


@pytest.mark.parametrize(("name", "damage"), [("scores", "cut off"), ("layers.*.1", "changed")])
def test_damaged_files_are_removed_with_a_warning(model: Path, complete: Path, output: Path, name: str, damage: str):
    (path,) = output.parent.glob(f".out.progress/run.{name}.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data[:-9] if damage == "cut off" else data)
    done = job(model, output)
    left = {} if name == "scores" else {"batch": 0, "score": 0, "fit": 2, "quantize": 2}
    assert work(done) == COMPLETE | left
    (message,) = (each for each in done["messages"] if "is damaged" in each)
    assert path.name in message
    assert_equal(output, complete)


def test_two_runs_at_once(model: Path, output: Path):
    """The second one stops before it calibrates, and the first one goes on."""
    directory = output.parent / ".out.progress"
    running = Progress(directory, "text", {})
    second = start(model, output)
    assert second.wait() == 1
    assert f"CoverageError: {directory} is in use by another run" in second.stderr
    running.close()
    assert len(list(directory.iterdir())) > 3


# --- models and recipes


@pytest.mark.parametrize(
    ("order", "moment"),
    [
        ({"offload": True, "bfloat16": True, "ignore": ["model.layers.0"], "sparsity": 0.75}, ("fit", 1)),
        ({"quantizes": False, "pruning": {"layout": "padded", "refit": "down"}}, ("fit", 2)),
        ({"only_quantizes": True}, ("quantize", 2)),
    ],
)
def test_models_and_recipes(model: Path, tmp_path: Path, order: dict[str, Any], moment: tuple[str, int]):
    """In bfloat16, offloaded, with an ignored layer and removed experts; padded without quantization; unpruned."""
    all_work = work(job(model, tmp_path / "complete", **order))
    kill(model, tmp_path / "out", *moment, **order)
    done = job(model, tmp_path / "out", **order)
    assert work(done)[moment[0]] == all_work[moment[0]] - moment[1]
    assert work(done)["batch"] == 0
    assert_equal(tmp_path / "out", tmp_path / "complete")


def test_text_that_the_model_wrote_is_not_written_again(model: Path, tmp_path: Path):
    """The command is killed when it begins to score, and cannot write text when it is given again."""
    command = ["oneshot", model, "--recipe", "fisher_p50", "--recipe-args", "block_size=16", "pictures=false"]
    command += ["--samples", 8, "--sequence-length", 48, "--output", tmp_path / "out"]
    assert processes.start("-c", COMMAND, "compression.oneshot", *command).wait() == KILLED
    again = processes.start("-c", COMMAND, "calibration_data.sample_text", *command)
    assert again.wait() == 0, again.stderr[-4000:]
    assert load_scores(tmp_path / "out" / SCORES_NAME)[1]["calibration_text"]["samples"] == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_free_space_is_needed_for_the_progress_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that would have room for the checkpoint alone; half of the experts' weights are kept twice."""
    stored = sum(tensor.nbytes for tensor in tensors(model).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=stored - 1000))
    message = refusal(model, resumed_runs.recipe({"quantizes": False}), tmp_path / "out")
    assert re.search(r"needs about .* GiB free: make room", message)
