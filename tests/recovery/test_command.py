"""``moe-coverage finetune``: its flags are the options of the function, and errors are one line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

import pytest

from moe_coverage_plugin.cli import main
from moe_coverage_plugin.cli.finetune import add_finetune
from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.recovery import RecoveryOptions
from tests.recovery.cycles import FAST

pytestmark = pytest.mark.slow


def test_every_option_has_a_flag():
    command = ArgumentParser()
    add_finetune(command)
    flags = {action.dest for action in command._actions}
    assert RecoveryOptions.model_fields.keys() <= flags


def test_missing_peft_is_an_error(pruned, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "text.txt").write_text("w5 " * 200)
    status = main(["finetune", str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")])
    assert status == 2
    assert capsys.readouterr().err == (
        f"moe-coverage: fine-tuning needs peft, which is not installed here: {how_to_install('finetune')}\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("option", [["--expert-rank", "0"], ["--warmup", "1"], ["--held-out", "nan"]])
def test_values_out_of_range_are_errors(pruned, tmp_path, capsys, option):
    (tmp_path / "text.txt").write_text("w5 " * 200)
    files = [str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert main(["finetune", *files, *option]) == 2
    assert f"moe-coverage: {option[0]} {option[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["checkpoint", "teacher"])
def test_wrong_paths_are_errors(pruned, tmp_path, capsys, wrong):
    files = ["--text", "absent.txt", "--output", str(tmp_path / "out")]
    checkpoint = str(tmp_path / "absent") if wrong == "checkpoint" else str(pruned)
    assert main(["finetune", checkpoint, *files, "--teacher", str(tmp_path / "absent")]) == 2
    assert f"{tmp_path / 'absent'} is not a model directory" in capsys.readouterr().err


def test_a_run_prints_the_loss_before_and_after(pruned, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(f"w{2 + i % 50}" for i in range(2000)))
    options = [
        part for name, value in (FAST | {"steps": 2}).items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    files = [str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert main(["finetune", *files, "--checkpointing", *options]) == 0
    out = capsys.readouterr().out
    assert "after 2 steps" in out
    assert f"Wrote {tmp_path / 'out'}" in out
