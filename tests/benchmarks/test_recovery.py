"""The recovery benchmark: how many steps fit, what share came back, and what is written of it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.recovery import fitting_steps, recovered_share, run_options, section
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.recovery import Recovered, RecoveryOptions

LOSSES = {"unpruned": {"a": 2.0, "b": 3.0}, "pruned": {"a": 2.5, "b": 3.5}, "recovered": {"a": 2.1, "b": 3.3}}


def record() -> dict[str, Any]:
    return {
        "model": "tiny",
        "device": "card",
        "command": "python -m benchmarks.recovery",
        "versions": {"torch": "2"},
        "seed": 0,
        "sparsity": 0.5,
        "block_size": 64,
        "dtype": "bfloat16",
        "calibration": "web: 96 windows",
        "trained_on": {"web": 1000},
        "evaluation": ["a: the first 8 windows", "b: the first 8 windows"],
        "teacher": False,
        "options": RecoveryOptions(steps=10).model_dump(),
        "minutes_asked": 10,
        "seconds": 580.0,
        "tokens": 40960,
        "losses": LOSSES,
        "recovered_share": recovered_share(LOSSES),
        "curve_share": 4,
        "curve": [{"step": 0, "held_out": 3.0}, {"step": 10, "held_out": 2.7}],
    }


def test_the_share_is_that_of_the_mean_rise():
    assert recovered_share(LOSSES) == pytest.approx(0.6)
    assert recovered_share(LOSSES | {"recovered": LOSSES["pruned"]}) == 0


def test_steps_that_fit():
    # six steps, the first of which take longer, and ten seconds beside them
    points = [{"step": step, "seconds": 5.0 if step < 2 else 1.0} for step in range(6)]
    probe = Recovered(3.0, 2.9, [{"step": 0, "held_out": 3.0}, *points], writes=True)
    assert fitting_steps(probe, 14.0 + 10.0, minutes=1.0) == int(0.95 * 50)
    assert fitting_steps(probe, 500.0, minutes=1.0) == 1


@pytest.mark.parametrize("steps", [1, 8, 9, 1000])
def test_a_run_stops_no_more_often_than_the_timed_one(steps: int):
    """To be measured and to be kept, so that what the timed run took beside its steps is what the run takes."""
    args = Namespace(seed=0, option={"batch_size": 4})
    timed, options = run_options(args, recovery.TIMED_STEPS), run_options(args, steps)
    assert timed.evaluate_every == timed.save_every == 1
    assert steps / options.evaluate_every <= recovery.TIMED_STEPS
    assert steps / options.save_every <= recovery.TIMED_STEPS
    assert options.batch_size == 4


def test_options_of_the_benchmark_itself_are_refused():
    with pytest.raises(CoverageError, match="steps is the benchmark's own"):
        run_options(Namespace(seed=0, option={"steps": 3}), 8)
    with pytest.raises(CoverageError, match="batchsize"):
        run_options(Namespace(seed=0, option={"batchsize": 3}), 8)


def test_the_whole_command(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a model to a line of the result file, twice through the text although there is time for more."""
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


def test_what_is_written():
    text = "\n\n".join(map(section, [record(), record() | {"model": "other"}]))
    assert "### tiny, 50% of the expert channels removed" in text
    assert "### other" in text
    assert "**Of the rise, 60% came back.**" in text
    assert "| recovered | 2.1000 | 3.3000 | 2.7000 | +0.2000 |" in " ".join(text.split()).replace("  ", " ")
