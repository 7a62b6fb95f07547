"""The recovery benchmark: the recovered share, options, and the record of a complete run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.recovery import recovered_share, run_options
from moe_coverage_plugin.manifest import CoverageError

LOSSES = {"unpruned": {"a": 2.0, "b": 3.0}, "pruned": {"a": 2.5, "b": 3.5}, "recovered": {"a": 2.1, "b": 3.3}}


def test_recovered_share_is_of_the_mean_over_texts():
    assert recovered_share(LOSSES) == pytest.approx(0.6)
    assert recovered_share(LOSSES | {"recovered": LOSSES["pruned"]}) == 0


def test_unknown_options_and_those_that_the_benchmark_sets_are_errors():
    with pytest.raises(CoverageError, match="option steps is set by the benchmark"):
        run_options(Namespace(seed=0, option={"steps": 3}), 8)
    with pytest.raises(CoverageError, match="batchsize"):
        run_options(Namespace(seed=0, option={"batchsize": 3}), 8)


@pytest.mark.slow
def test_complete_run(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run writes a record; ``--epochs 2`` limits the steps, although the time would allow more."""
    output = tmp_path / "recovery.json"
    command = f"""recovery --model tiny={model_path} --train text={model_path}/calibration.txt
        --evaluation held={model_path}/heldout.txt --windows 1 --calibration-windows 2 --block-size 32
        --minutes 1 --epochs 2 --option batch_size=2 expert_rank=4 --directory {tmp_path} --output {output}"""
    monkeypatch.setattr(sys, "argv", command.split())
    recovery.main()
    (found,) = json.loads(output.read_text())
    assert found["options"]["steps"] == 5
    assert found["tokens"] == 5 * 2 * 512
    assert [point["step"] for point in found["curve"]] == [0, 1, 2, 3, 4, 5]
    assert found["seconds"] < 60
    assert found["losses"]["recovered"] != found["losses"]["pruned"] != found["losses"]["unpruned"]
    assert [path.name for path in tmp_path.iterdir()] == ["recovery.json"]
