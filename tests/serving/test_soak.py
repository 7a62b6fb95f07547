"""The mixed load in a real engine: every kind of request, memory, and answers beside those of single requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import __main__ as serving
from benchmarks.soak import __main__ as benchmark
from benchmarks.soak.traffic import KINDS
from tests import processes
from tests.serving.engine import REPOSITORY, checkpoint_path


@pytest.mark.engine
def test_load_on_a_tiny_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, checkpoint = tmp_path / "soak.json", checkpoint_path("ragged_w4a16")
    options = ["--checkpoints", f"ours={checkpoint}", "--minutes", "0.1", "--warm-up-minutes", "0", "--at-once", "4"]
    options += ["--small", "--enforce-eager", "--max-model-len", "64", "--output", str(output)]

    def forked(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        done = processes.run(*command[1:], env=env, cwd=REPOSITORY)
        stdout.write(done.stdout + done.stderr)
        return done

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # as its documentation says
    monkeypatch.setattr(serving, "subprocess", SimpleNamespace(run=forked, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(sys, "argv", ["benchmarks.soak", *options])
    benchmark.main()
    record = json.loads(output.read_text())
    [(name, figures)] = record["checkpoints"].items()
    assert name == "ours"
    assert figures["experts_run_by"] == ["RaggedExpertsMethod"]
    assert figures["requests"].keys() <= KINDS.keys()
    assert sum(figures["requests"].values()) > 0
    assert figures["failures"] == []
    assert figures["comparison"]["answers"] > 0
    assert figures["comparison"]["worst_answer"] < 0.1
    assert all(host > 2**20 for _, _, host in figures["samples"])
    assert "ours: requests finished" in capsys.readouterr().out


def test_checkpoints_without_a_configuration_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark._parser().parse_args(["--output", "x.json", "--checkpoints", "ours=/nowhere"])
    assert "ours=/nowhere: must be NAME=DIR, and DIR must have a config.json" in capsys.readouterr().err
