"""``moe-coverage eval``: the table of changes, and errors, which are one line before a model is opened."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from moe_coverage_plugin.cli import main
from moe_coverage_plugin.cli.evaluation import add_eval
from moe_coverage_plugin.evaluation import backends, local_tasks
from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.options import EvaluationOptions
from tests.evaluation.questions import QUIZ, TEXT

pytestmark = pytest.mark.slow


@pytest.fixture
def error_of(capsys, monkeypatch, tmp_path):
    """Run the command, and check that it exits with status 2 and one line before it opens a model or writes a file."""
    # datasets searches the current directory, which can be large, for the files of a data set without data_files
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(backends, "open_backend", lambda *_: pytest.fail("a model was opened"))
        before = sorted(tmp_path.iterdir())
        capsys.readouterr()
        assert main(["eval", *map(str, arguments)]) == 2
        assert sorted(tmp_path.iterdir()) == before
        err = capsys.readouterr().err
        # datasets prints progress bars before the message
        message = err[err.index("moe-coverage: ") :]
        assert message.count("\n") == 1
        return message

    return run


def test_every_option_has_a_flag():
    command = ArgumentParser()
    add_eval(command)
    flags = {action.dest for action in command._actions}
    assert EvaluationOptions.model_fields.keys() | local_tasks.FIELDS.keys() <= flags


def test_comparison_of_two_checkpoints(original, four_bits, lines, tmp_path, capsys):
    files = ["--multiple-choice", str(lines("quiz", QUIZ)), "--text", str(lines("prose", TEXT))]
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    assert main(["eval", str(original), *files, "--output", before]) == 0
    assert main(["eval", str(four_bits), *files, "--output", after, "--compare", before]) == 0
    out = capsys.readouterr().out
    table = out[out.rindex("\ntask") :].strip().splitlines()
    assert main(["eval", "--compare", before, after]) == 0
    assert capsys.readouterr().out.strip().endswith("\n".join(table))

    found = [json.loads(Path(file).read_text()) for file in (before, after)]
    sizes = [each["weight_bytes"] for each in found]
    assert table[0].split() == ["task", "before", "after", "change"]
    assert table[1].split() == [
        *("weights,", "MiB", f"{sizes[0] / 2**20:.2f}", f"{sizes[1] / 2**20:.2f}"),
        *(f"{100 * (sizes[1] / sizes[0] - 1):+.1f}", "%"),
    ]
    bits = [each["tasks"]["prose"]["metrics"]["bits_per_byte"]["value"] for each in found]
    assert table[-1].split() == [
        *("prose", "bits_per_byte", "↓", f"{bits[0]:.4f}", f"{bits[1]:.4f}", f"{bits[1] - bits[0]:+.4f}")
    ]

    found[1]["tasks"]["quiz"]["settings"]["limit"] = 7
    (tmp_path / "after.json").write_text(json.dumps(found[1]))
    assert main(["eval", "--compare", before, after]) == 2
    assert "quiz was run with limit None (not 7) in after" in capsys.readouterr().err


def test_user_defined_tasks(pruned, error_of, lines, tmp_path):
    """Tasks in --include-path are found, and a task that lm-eval cannot build is an error."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.yaml").write_text("task: own\ndataset_path: json\ntest_split: test\n")
    message = error_of(pruned, "--tasks", "own", "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "the task own cannot be built" in message
    quiz = lines("own", QUIZ)
    more = ("--multiple-choice", quiz, "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "two tasks are called own" in error_of(pruned, "--tasks", "own", *more)
    assert "is not a directory" in error_of(
        pruned, "--text", quiz, "--include-path", quiz, "--output", tmp_path / "o.json"
    )


def test_tasks_that_run_generated_programs(pruned, error_of, lines, tmp_path):
    quiz = lines("rows", QUIZ)
    config = f"""
task: programs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {quiz}}}}}
test_split: test
unsafe_code: true
num_fewshot: 0
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "programs.yaml").write_text(config)
    arguments = (pruned, "--tasks", "programs", "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "runs programs that the model writes: add --run-unsafe-code" in error_of(*arguments)
    assert "fixed at 0 examples" in error_of(*arguments, "--run-unsafe-code", "--few-shot", 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "no task is given"),
        (("--limit", 0, "--text", "x"), "--limit 0 must be an integer, at least 1"),
        (("--fields", "question"), "'question' is not an assignment"),
        (("--fields", "question=query"), "is not a field of the given kinds of JSON lines"),
        (("--model-args", "max_model_len=64"), "arguments of vLLM's engine"),
        (("--backend", "vllm"), "vllm is not installed here, and backend vllm needs it"),
        (("--backend", "vllm", "--device", "cuda"), "set CUDA_VISIBLE_DEVICES"),
        (("--compare", "none.json"), "none.json cannot be read"),
    ],
)
def test_invalid_options(pruned, error_of, tmp_path, more, message):
    assert message in error_of(pruned, "--output", tmp_path / "out.json", *more)


def test_invalid_checkpoints(pruned, error_of, lines, tmp_path):
    quiz = lines("quiz", QUIZ)
    files = ("--multiple-choice", quiz, "--output", tmp_path / "out.json")
    assert "is not a model directory (there is no such directory)" in error_of(tmp_path / "none", *files)
    assert "is not a model directory (it has no config.json)" in error_of(tmp_path, *files)
    assert "--output is not given" in error_of(pruned, "--multiple-choice", quiz)
    assert "there is nothing to do" in error_of()
    copy = shutil.copytree(pruned, tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"{copy} has no tokenizer" in error_of(copy, *files)


def test_a_file_that_cannot_be_written(pruned, error_of, lines, tmp_path):
    """Such a file is an error before the evaluation, also for root, which ignores permissions."""
    quiz = lines("quiz", QUIZ)
    for place, where in ((Path("/proc/deep/out.json"), "/proc"), (quiz / "deep" / "out.json", quiz)):
        message = error_of(pruned, "--multiple-choice", quiz, "--output", place)
        assert f"{place} cannot be created: {where} is not writable" in message
    assert "cannot be written" in error_of(pruned, "--multiple-choice", quiz, "--output", tmp_path)


def test_missing_lm_eval_is_an_error(pruned, error_of, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    message = error_of(pruned, "--tasks", "arc_easy", "--output", tmp_path / "out.json")
    assert message == f"moe-coverage: lm-eval is not installed here: {how_to_install('eval')}\n"
