"""Data-parallel calibration in real processes: two ranks come to the plan of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(output: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE.parent), str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = (HERE / "rank_worker.py", output.parent / "model", output, *options)
    return subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True)


@pytest.fixture
def output(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").symlink_to(source)
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_two_ranks_come_to_the_plan_of_one(output: Path):
    for command in ((sys.executable,), TORCHRUN):
        run = start(output, *command)
        assert run.returncode == 0, run.stderr[-3000:]
    names = ("rank0of1", "rank0of2", "rank1of2")
    alone, *ranks = (json.loads((output / f"{name}.json").read_text()) for name in names)
    # widths, order of channels, routed tokens, and what the scores were measured on
    assert ranks == [alone, alone]
    scores, *parts = (torch.load(output / f"{name}.pt") for name in names)
    assert torch.equal(*parts)
    torch.testing.assert_close(parts[0], scores, rtol=1e-9, atol=0)


def test_ranks_that_are_dealt_the_same_samples_are_refused(output: Path):
    run = start(output, *TORCHRUN, options=("--same-data",))
    assert run.returncode != 0
    assert "ranks calibrate on the same" in run.stderr
    assert not list(output.iterdir())
