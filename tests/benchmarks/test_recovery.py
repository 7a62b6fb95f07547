"""The recovery benchmark: how many steps fit, what share came back, and what is written of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.recovery import fitting_steps, recovered_share, section
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


def test_what_is_written():
    text = section([record(), record() | {"model": "other"}])
    assert "### tiny, 50% of the expert channels removed" in text
    assert "### other" in text
    assert "**Of the rise, 60% came back.**" in text
    assert "| recovered | 2.1000 | 3.3000 | 2.7000 | +0.2000 |" in " ".join(text.split()).replace("  ", " ")
