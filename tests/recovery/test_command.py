"""``moe-coverage finetune``: what it offers is what the function takes, and a missing peft is told."""

from __future__ import annotations

import sys

import pytest

from moe_coverage_plugin.cli import main
from moe_coverage_plugin.cli.finetune import OPTIONS
from moe_coverage_plugin.recovery import RecoveryOptions
from tests.recovery.cycles import FAST


def test_options_and_defaults_are_those_of_the_function():
    offered = {
        name.replace("-", "_"): (kind, default) for group in OPTIONS.values() for name, kind, default, _ in group
    }
    fields = RecoveryOptions.model_fields
    assert offered.keys() | {"mode", "checkpointing", "dtype", "nf4"} == fields.keys()
    for name, (kind, default) in offered.items():
        assert fields[name].default == default
        assert fields[name].annotation in (kind, kind | None)


def test_a_missing_peft_is_told(pruned, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "text.txt").write_text("w5 " * 200)
    status = main(["finetune", str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")])
    assert status == 2
    assert capsys.readouterr().err == (
        "moe-coverage: fine-tuning needs peft, which is not installed here: pip install "
        '"moe-coverage-plugin[finetune]"\n'
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("option", [["--expert-rank", "0"], ["--warmup", "1"], ["--held-out", "nan"]])
def test_values_out_of_range(pruned, tmp_path, capsys, option):
    (tmp_path / "text.txt").write_text("w5 " * 200)
    files = [str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert main(["finetune", *files, *option]) == 2
    assert option[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


def test_a_run_says_what_it_brought(pruned, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(f"w{2 + i % 50}" for i in range(2000)))
    options = [
        part for name, value in (FAST | {"steps": 2}).items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    files = [str(pruned), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert main(["finetune", *files, "--checkpointing", *options]) == 0
    out = capsys.readouterr().out
    assert "after 2 steps" in out
    assert f"Wrote {tmp_path / 'out'}" in out
