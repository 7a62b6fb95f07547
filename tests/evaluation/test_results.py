"""Results are stored after each task, and not mixed with those of other checkpoints, settings or data."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask, Results, backends, evaluate, run
from tests.evaluation.questions import QUIZ, TEXT

pytestmark = pytest.mark.slow


@pytest.fixture
def quiz(lines):
    return LocalTask("multiple_choice", lines("quiz", QUIZ))


@pytest.fixture
def prose(lines):
    return LocalTask("text", lines("prose", TEXT))


@pytest.fixture
def no_model(monkeypatch):
    """Function after whose call opening a model fails."""

    def fail(*_):
        raise AssertionError("a model was opened")

    return lambda: monkeypatch.setattr(backends, "open_backend", fail)


def test_an_interrupted_run_continues(pruned, quiz, prose, tmp_path, monkeypatch, no_model):
    """If a run is interrupted in the second task, the file has the first, and the next run computes the second."""
    output = tmp_path / "found.json"
    original = run._run
    ran = []

    def interrupted(unit, *others):
        ran.append(unit.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return original(unit, *others)

    monkeypatch.setattr(run, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(pruned), [], output, local=[quiz, prose])
    first = json.loads(output.read_text())["tasks"]
    assert list(first) == ["quiz"]

    evaluate(str(pruned), [], output, local=[quiz, prose])
    assert ran == ["quiz", "prose", "prose"]
    written = Results.read(output)
    assert written.tasks["quiz"] == first["quiz"]
    assert list(written.tasks) == ["quiz", "prose"]
    assert written.weight_bytes == sum(file.stat().st_size for file in pruned.glob("*.safetensors"))
    assert written.tasks["prose"]["versions"]["lm-eval"]

    no_model()
    assert evaluate(str(pruned), [], output, local=[prose, quiz]) == written
    with pytest.raises(CoverageError, match=r"quiz has results with limit None \(not 1\): choose another file"):
        evaluate(str(pruned), [], output, EvaluationOptions(limit=1), [quiz])
    quiz.file.write_text(json.dumps(QUIZ[0]) + "\n")
    with pytest.raises(CoverageError, match="quiz has results with other prompts or data"):
        evaluate(str(pruned), [], output, local=[quiz])
    assert Results.read(output) == written


def test_results_of_another_checkpoint_are_an_error(pruned, quiz, tmp_path, no_model):
    """The checkpoints differ in one weight, and have equal sizes and configurations."""
    copy, output = shutil.copytree(pruned, tmp_path / "copy"), tmp_path / "found.json"
    Results.of(str(pruned), pruned).write(output)
    assert Results.of(str(copy), copy).fingerprint == Results.read(output).fingerprint
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    no_model()
    with pytest.raises(CoverageError, match="has results of another checkpoint"):
        evaluate(str(copy), [], output, local=[quiz])


@pytest.mark.parametrize("written", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "tasks": {}}'])
def test_files_without_results_are_errors(tmp_path, written):
    (tmp_path / "found.json").write_text(written)
    with pytest.raises(CoverageError, match=r"found\.json"):
        Results.read(tmp_path / "found.json")
