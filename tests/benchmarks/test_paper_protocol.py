"""The paper's protocol: its commands are valid, and one row is measured on a tiny model."""

from __future__ import annotations

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from benchmarks import paper_protocol
from moe_coverage_plugin.cli import COMMANDS
from moe_coverage_plugin.cli.arguments import build_parser
from moe_coverage_plugin.recipe_files import recipe_path
from tests import processes

CALIBRATION = ("--calibration", "c4=c4.txt", "gsm8k=gsm8k.txt", "code=code.txt")


def printed(capsys, *arguments):
    """Parse the commands of a dry run with the parser of ``moe-coverage``."""
    assert paper_protocol.main([*map(str, arguments), "--dry-run"]) == 0
    script = build_parser(dict.fromkeys(COMMANDS))
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    commands = [shlex.split(line) for line in lines]
    assert all(command[:3] == [sys.executable, "-m", "moe_coverage_plugin.cli"] for command in commands)
    return [script.parse_args(command[3:]) for command in commands]


def test_all_rows(capsys, tmp_path):
    done = printed(capsys, "--work", tmp_path, *CALIBRATION)
    evaluated = [command for command in done if getattr(command, "tasks", None)]
    cells = {(command.checkpoint, *command.tasks) for command in evaluated}
    assert len(cells) == len(evaluated) == 4 * len(paper_protocol.VARIANTS) * 10
    assert {command.few_shot for command in evaluated if command.tasks == ["mmlu"]} == {5}
    recipes = {command.recipe for command in done if hasattr(command, "recipe")}
    assert recipes == set(paper_protocol.VARIANTS) - {paper_protocol.UNPRUNED}
    assert all(recipe_path(recipe) for recipe in recipes)


def test_calibration_on_the_domain(capsys, tmp_path):
    rows = ("--work", tmp_path, "--model", "qwen3-30b-a3b", "--variant", "recommended_p50", *CALIBRATION, "--matched")
    for task, text in (
        ("gsm8k", "gsm8k.txt"),
        ("math500", "gsm8k.txt"),
        ("humaneval", "code.txt"),
        ("piqa", "c4.txt"),
    ):
        oneshot, evaluation, _ = printed(capsys, *rows, "--task", task)
        assert oneshot.data == [text]
        assert evaluation.checkpoint == oneshot.output
        assert text.removesuffix(".txt") in oneshot.output
    (oneshot, *_) = printed(capsys, *rows[:-1], "--task", "gsm8k")
    assert oneshot.data == ["c4.txt", "gsm8k.txt", "code.txt"]


def test_missing_texts_and_unknown_models_are_errors(tmp_path):
    with pytest.raises(SystemExit, match="needs text to calibrate on for piqa: add --calibration NAME=FILE"):
        paper_protocol.main(["--work", str(tmp_path), "--task", "piqa", "--dry-run"])
    texts = ["--calibration", "c4=c4.txt", "--matched", "--task", "humaneval"]
    with pytest.raises(SystemExit, match="add --calibration code=FILE"):
        paper_protocol.main(["--work", str(tmp_path), *texts, "--dry-run"])
    with pytest.raises(SystemExit, match=r"qwen9 is neither NAME=PATH nor one of qwen1\.5"):
        paper_protocol.main(["--work", str(tmp_path), "--model", "qwen9", "--dry-run"])


@pytest.mark.slow
def test_a_row_of_a_tiny_model(model_path, tmp_path, capsys, monkeypatch):
    """A row is pruned and measured; when it is run again, neither is repeated."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    forked = SimpleNamespace(run=lambda command, **_: processes.run(*command[1:]))
    monkeypatch.setattr(paper_protocol, "subprocess", forked)
    (tmp_path / "text.txt").write_text(" ".join(f"w{200 + i * i % 300}" for i in range(400)))
    row = {"question": "w205 w217", "choices": ["w241 w299", "w307"], "answer": 1}
    (tmp_path / "quiz.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "prune_stage:\n  prune_modifiers:\n    AttributionModifier: {}\n    CoverageModifier: {sparsity: 0.4}\n"
        "    AlignmentModifier: {block_size: 64}\n    ChannelPruningModifier: {}\n"
    )
    rows = ("--work", str(tmp_path / "work"), "--model", f"tiny={model_path}", "--variant")
    rows += (str(tmp_path / "recipe.yaml"), "--multiple-choice", str(tmp_path / "quiz.jsonl"))
    rows += ("--calibration", f"words={tmp_path / 'text.txt'}", "--samples", "4", "--sequence-length", "32")
    assert paper_protocol.main(rows) == 0
    (file,) = (tmp_path / "work" / "tiny").glob("*.json")
    written = json.loads(file.read_text())
    original = sum(each.stat().st_size for each in model_path.glob("*.safetensors"))
    assert written["weight_bytes"] < original
    assert set(written["tasks"]["quiz"]["metrics"]) == {"acc", "acc_norm"}
    capsys.readouterr()
    evaluation, comparison = printed(capsys, *rows)
    assert evaluation.output == str(file)
    assert comparison.compare == [str(file)]
