"""``moe-coverage eval``: a table of what changed, and mistakes in one line before anything is opened."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.paper_protocol import TASKS
from moe_coverage_plugin.cli import evaluation as command
from moe_coverage_plugin.cli import main
from moe_coverage_plugin.evaluation import backends, local_tasks
from moe_coverage_plugin.evaluation.tasks import Tasks
from moe_coverage_plugin.options import EvaluationOptions
from moe_coverage_plugin.options.base import choices
from tests.evaluation.questions import QUIZ, TEXT


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs the script, which must end with status 2 and one line, having opened and written nothing."""
    # data sets without a file of their own are looked for among all files here, environments in a clone included
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(backends, "open_backend", lambda *_: pytest.fail("a model was opened"))
        before = sorted(tmp_path.iterdir())
        capsys.readouterr()
        assert main(["eval", *map(str, arguments)]) == 2
        assert sorted(tmp_path.iterdir()) == before
        err = capsys.readouterr().err
        # data sets show how far they are
        told = err[err.index("moe-coverage: ") :]
        assert told.count("\n") == 1
        return told

    return run


def test_choices_are_those_of_the_function():
    fields = EvaluationOptions.model_fields
    assert (choices(fields["backend"]), choices(fields["dtype"])) == (command.BACKENDS, command.DTYPES)
    assert tuple(local_tasks.FIELDS) == command.KINDS


def test_before_and_after(original, four_bits, lines, tmp_path, capsys):
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


def test_names_that_lm_eval_does_not_know(pruned, refused, tmp_path, monkeypatch):
    """The names of the paper's tasks are known to it; looking through all of them takes seconds, so once."""
    found = {}
    check = Tasks._check_known

    def keep(self, names):
        found["tasks"] = self
        check(self, names)

    monkeypatch.setattr(Tasks, "_check_known", keep)
    told = refused(pruned, "--tasks", "arc_esy", "--output", tmp_path / "out.json")
    assert "lm-eval has no task 'arc_esy', near it are arc_easy" in told
    assert {protocol.task for protocol in TASKS.values()} <= set(found["tasks"].manager.all_tasks)


def test_a_task_file_of_ones_own(pruned, refused, lines, tmp_path):
    """A name in --include-path is found, and a file that lm-eval cannot build is told."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.yaml").write_text("task: own\ndataset_path: json\ntest_split: test\n")
    told = refused(pruned, "--tasks", "own", "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "the task own cannot be built" in told
    quiz = lines("own", QUIZ)
    more = ("--multiple-choice", quiz, "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "two tasks are called own" in refused(pruned, "--tasks", "own", *more)
    assert "is no directory" in refused(
        pruned, "--text", quiz, "--include-path", quiz, "--output", tmp_path / "o.json"
    )


def test_programs_that_a_model_writes(pruned, refused, lines, tmp_path):
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
    asked = (pruned, "--tasks", "programs", "--include-path", tmp_path / "own", "--output", tmp_path / "out.json")
    assert "runs programs that the model writes: add --run-unsafe-code" in refused(*asked)
    assert "fixed at 0 examples" in refused(*asked, "--run-unsafe-code", "--few-shot", 5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "no task is given"),
        (("--limit", 0, "--text", "x"), "limit=0 of EvaluationOptions must be an integer, at least 1"),
        (("--fields", "question"), "'question' is no assignment"),
        (("--fields", "question=query"), "names no field of the given JSON lines"),
        (("--model-args", "max_model_len=64"), "arguments of vLLM's engine"),
        (("--backend", "vllm"), 'vllm is not installed here: pip install "moe-coverage-plugin[serve,eval]"'),
        (("--backend", "vllm", "--device", "cuda"), "set CUDA_VISIBLE_DEVICES"),
        (("--compare", "none.json"), "none.json cannot be read"),
    ],
)
def test_options(pruned, refused, tmp_path, more, words):
    assert words in refused(pruned, "--output", tmp_path / "out.json", *more)


def test_checkpoints(pruned, refused, lines, tmp_path):
    quiz = lines("quiz", QUIZ)
    files = ("--multiple-choice", quiz, "--output", tmp_path / "out.json")
    assert "neither a directory nor a model" in refused(tmp_path / "none", *files)
    assert "is no checkpoint" in refused(tmp_path, *files)
    assert "where to write the results is not given" in refused(pruned, "--multiple-choice", quiz)
    assert "neither a checkpoint" in refused()
    copy = shutil.copytree(pruned, tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"{copy} holds no tokenizer" in refused(copy, *files)


def test_a_file_that_cannot_be_written(pruned, refused, lines, tmp_path):
    """Told before the work, also to root, who may write where nothing can be."""
    quiz = lines("quiz", QUIZ)
    for place, where in ((Path("/proc/deep/out.json"), "/proc"), (quiz / "deep" / "out.json", quiz)):
        told = refused(pruned, "--multiple-choice", quiz, "--output", place)
        assert f"{place} cannot be created: {where} is not writable" in told
    assert "cannot be read" in refused(pruned, "--multiple-choice", quiz, "--output", tmp_path)


def test_a_missing_lm_eval_is_told(pruned, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    told = refused(pruned, "--tasks", "arc_easy", "--output", tmp_path / "out.json")
    assert told == 'moe-coverage: lm-eval is not installed here: pip install "moe-coverage-plugin[eval]"\n'
