"""Every subcommand with wrong paths, text or tasks: one line that says what is wrong, before torch is imported.

Field case 2.20: a wrong path took 19 seconds, and the message was about something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_coverage_plugin.manifest import SCORES_NAME

HEAVY = ("torch", "transformers", "llmcompressor", "datasets", "lm_eval", "matplotlib", "peft")
PROGRAM = f"""
import contextlib, io, json, sys
from moe_coverage_plugin.cli import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(json.dumps([status, err.getvalue(), heavy]))
"""
ONESHOT = ["--recipe", "fisher_p50", "--data", "file.txt", "--output", "out"]
FINETUNE = ["--text", "file.txt", "--output", "out"]
EVAL = ["--tasks", "piqa", "--output", "results.json"]
NO_MODEL = "is not a model directory"
# arguments, and parts of the message
CASES: list[tuple[list[str], tuple[str, ...]]] = [
    (["inspect", "absent"], ("absent is not a directory",)),
    (["inspect", "file.txt"], ("file.txt is not a directory",)),
    (["inspect", "empty"], ("empty/config.json",)),
    (["inspect", "plain"], ("plain is not a pruned checkpoint",)),
    (["inspect", "org/name"], ("org/name is not a directory",)),
    (["inspect", "plain", "--json", "empty"], ("empty cannot be written (it is a directory)",)),
    (["inspect", "plain", "--json", "file.txt/out.json"], ("cannot be created", "Not a directory")),
    (["inspect", "plain", "--pictures", "file.txt"], ("file.txt exists and is not a directory",)),
    (["plan", "absent", "--sparsity", "0.5"], ("there is no score file absent",)),
    (["plan", "empty", "--sparsity", "0.5"], ("empty is a directory without moe_coverage/scores.safetensors",)),
    (["plan", "plain", "--sparsity", "0.5"], ("plain is a directory without moe_coverage/scores.safetensors",)),
    (["plan", "file.txt", "--sparsity", "0.5", "--json", "empty"], ("empty cannot be written",)),
    (["sample", "absent/model", "--output", "own.jsonl"], ("absent/model is not a model directory",)),
    (["sample", "plain", "--output", "file.txt"], ("output file.txt exists",)),
    (["sample", "plain", "--output", "empty"], ("empty cannot be written (it is a directory)",)),
    (["sample", "plain", "--output", "own.jsonl", "--engine", "vllm"], ("needs vLLM, which is not installed here",)),
    (["sample", "plain", "--output", "own.jsonl", "--samples", "0"], ("--samples",)),
    (["finetune", "absent", *FINETUNE], (NO_MODEL, "no such directory")),
    (["finetune", "file.txt", *FINETUNE], (NO_MODEL, "it is a file")),
    (["finetune", "empty", *FINETUNE], (NO_MODEL, "no config.json")),
    (["finetune", "plain", *FINETUNE], ("plain is not a pruned checkpoint", "prune the model first")),
    (["finetune", "CHECKPOINT", "--text", "absent", "--output", "out"], ("--text absent cannot be read",)),
    (["finetune", "CHECKPOINT", "--text", "empty", "--output", "out"], ("--text empty is a directory",)),
    (["finetune", "CHECKPOINT", "--text", "file.txt", "--output", "file.txt"], ("is not a directory",)),
    (["finetune", "CHECKPOINT", "--text", "file.txt", "--output", "file.txt/out"], ("cannot be created",)),
    (["finetune", "CHECKPOINT", *FINETUNE, "--evaluation", "absent"], ("--evaluation absent cannot be read",)),
    (["finetune", "CHECKPOINT", *FINETUNE, "--teacher", "absent"], ("absent", NO_MODEL)),
    (["finetune", "CHECKPOINT", "--text", "none.txt", "--output", "out"], ("none.txt has 0 tokens", "window of 512")),
    (["finetune", "CHECKPOINT", *FINETUNE], ("file.txt has at most 100 tokens, fewer than one window of 512",)),
    (["finetune", "CHECKPOINT", *FINETUNE, "--sequence-length", "4096"], ("fewer than one window of 4096",)),
    (
        ["finetune", "CHECKPOINT", "--text", "chat.jsonl", "--output", "out"],
        ("chat.jsonl row 1", "apply_chat_template"),
    ),
    (
        ["finetune", "CHECKPOINT", "--text", "WEIGHTS", "--evaluation", "none.txt", "--output", "out"],
        ("none.txt has 0",),
    ),
    (["finetune", "CHECKPOINT", *FINETUNE, "--tokenizer", "empty"], ("empty has no tokenizer: give the directory",)),
    (["oneshot", "CHECKPOINT", *ONESHOT], ("file.txt has at most 100 tokens, fewer than one window of 256",)),
    (["oneshot", "CHECKPOINT", *ONESHOT, "--sequence-length", "101"], ("fewer than one window of 101",)),
    (["oneshot", "CHECKPOINT", *ONESHOT[:3], "none.txt", *ONESHOT[4:]], ("none.txt has 0 tokens",)),
    (["oneshot", "CHECKPOINT", *ONESHOT[:3], "chat.jsonl", *ONESHOT[4:]], ("no text in 'text', only messages",)),
    (["oneshot", "CHECKPOINT", *ONESHOT[:3], "none.txt", "chat.jsonl", *ONESHOT[4:]], ("chat.jsonl row 1",)),
    (["oneshot", "plain", *ONESHOT], ("plain has no tokenizer",)),
    (["oneshot", "./absent", *ONESHOT], (NO_MODEL, "no such directory")),
    (["oneshot", "absent/model/directory", *ONESHOT], (NO_MODEL, "no such directory")),
    (["oneshot", "org/name", *ONESHOT], ("org/name is not a model directory or hub name", "the hub cannot be asked")),
    (["oneshot", "file.txt", *ONESHOT], (NO_MODEL, "it is a file")),
    (["oneshot", "empty", *ONESHOT], (NO_MODEL, "no config.json")),
    (["oneshot", "plain", *ONESHOT[:-1], "file.txt"], ("file.txt exists and is not a directory",)),
    (["oneshot", "plain", *ONESHOT[:-1], "file.txt/out"], ("cannot be created",)),
    (["oneshot", "plain", "--recipe", "absent", *ONESHOT[2:]], ("there is no recipe 'absent'",)),
    (["oneshot", "plain", "--recipe", "file.txt", *ONESHOT[2:]], ("recipe file.txt cannot be read as YAML", "line 1")),
    (["oneshot", "plain", "--recipe", "fisher_p50", "--data", "absent", "--output", "o"], ("absent does not exist",)),
    (["oneshot", "plain", "--recipe", "fisher_p50", "--data", "empty", "--output", "o"], ("empty is a directory",)),
    (["eval", "./absent", *EVAL], (NO_MODEL, "no such directory")),
    (["eval", "org/name", *EVAL], ("org/name is not a model directory or hub name", "the hub cannot be asked")),
    (["eval", "file.txt", *EVAL], (NO_MODEL, "it is a file")),
    (["eval", "empty", *EVAL], (NO_MODEL, "no config.json")),
    (["eval", "plain", *EVAL[:-1], "empty"], ("empty cannot be written (it is a directory)",)),
    (["eval", "plain", *EVAL[:-1], "file.txt/results.json"], ("cannot be created",)),
    (["eval", "plain", "--tasks", "nosuch", "--output", "other.json"], ("lm-eval has no task 'nosuch'",)),
    (["eval", "plain", "--tasks", "arc_esy", "--output", "other.json"], ("similar names are arc_easy",)),
    (["eval", "--compare", "absent"], ("--compare absent cannot be read",)),
    (["eval", "--compare", "empty"], ("--compare empty is a directory",)),
    (["pareto", "absent", "--output", "a.png"], ("absent cannot be read", "No such file")),
    (["pareto", "empty", "--output", "a.png"], ("empty cannot be read", "directory")),
    (["pareto", "file.txt", "--output", "a.png"], ("file.txt line 1 is not JSON",)),
    (["pareto", "results.json", "--output", "a.png"], ("was written by moe-coverage eval",)),
    (["pareto", "file.txt", "--output", "empty"], ("empty cannot be written (it is a directory)",)),
]
# these read the file by a library for tables and pictures
READS = ("pareto",)


@pytest.fixture(scope="module")
def done(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[str]]]:
    place = tmp_path_factory.mktemp("wrong")
    (place / "empty").mkdir()
    (place / "plain").mkdir()
    (place / "plain" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (place / "file.txt").write_text("not JSON, not YAML: [")
    (place / "none.txt").touch()
    (place / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}]}')
    (place / "results.json").write_text('{"checkpoint": "x", "tasks": {}}')
    before = sorted(place.iterdir())
    known = {"CHECKPOINT": str(pruned), "WEIGHTS": str(pruned / "model.safetensors")}
    commands = [[known.get(part, part) for part in arguments] for arguments, _ in CASES]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        cwd=place,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert sorted(place.iterdir()) == before
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


def cases() -> Iterator[object]:
    for number, (arguments, parts) in enumerate(CASES):
        yield pytest.param(number, parts, id=f"{number} {' '.join(arguments)}"[:60])


@pytest.mark.parametrize(("number", "parts"), cases())
def test_wrong_path(done: list[tuple[int, str, list[str]]], number: int, parts: tuple[str, ...]) -> None:
    status, message, heavy = done[number]
    assert status == 2
    assert message.startswith("moe-coverage: ")
    assert message.count("\n") == 1
    for part in parts:
        assert part in message
    earlier = CASES[: number + 1]
    if not any(arguments[0] in READS for arguments, _ in earlier):
        assert heavy == [], "an import that takes seconds came before the check"


def test_plan_of_a_checkpoint_is_that_of_its_scores(pruned: Path, script) -> None:
    """Field case 2.20: the directory of a checkpoint was said to be no score file."""
    options = ("--sparsity", "0.25")
    given, found = script("plan", pruned / SCORES_NAME, *options), script("plan", pruned, *options)
    assert (found.status, found.out) == (0, given.out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("command", [["inspect"], ["plan", "--sparsity", "0.5"]])
def test_no_permission(tmp_path: Path, refusal, command: list[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in refusal(command[0], tmp_path / "closed" / "file", *command[1:])
