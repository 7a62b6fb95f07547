"""A run shows one bar for the passes of all modifiers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moe_coverage_plugin import LayerwiseGPTQModifier
from moe_coverage_plugin.modifiers import run_bar
from tests.modifiers.harness import compress, pruning, save_tiny
from tests.modifiers.test_reconstruction_pass import BLOCK, SMALL, W4, many, recipe
from tests.tiny import add_tokenizer

pytestmark = pytest.mark.slow

RUN: dict[str, Any] = {"dataset": many(), "batch_size": 8, "moe_calibrate_all_experts": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_tiny(tmp_path_factory.mktemp("source") / "small", **SMALL))


def recommended() -> list[Any]:
    return [*recipe(), LayerwiseGPTQModifier(**W4)]


def closed_form() -> list[Any]:
    return [*pruning(block_size=BLOCK, layer_noise=1.0), LayerwiseGPTQModifier(**W4)]


@pytest.mark.parametrize(
    ("modifiers", "passes"),
    [
        (recommended, ["Gradient pass", "Channel interactions", "Reconstruction"]),
        (closed_form, ["Observing", "Layer importance", "Quantization"]),
    ],
)
def test_all_passes_share_one_bar(small: Path, modifiers: Any, passes: list[str], capsys: pytest.CaptureFixture[str]):
    compress(small, modifiers(), **RUN)
    bars = re.findall(
        r"(?:^|[\r\n])([A-Z][a-z ]+?)(?: \d+/\d+)?(?:, then ([a-z, ]+))?: +(\d+)%", capsys.readouterr().err
    )
    shown = [(title, then, int(percent)) for title, then, percent in bars if title in passes]
    # the last state is always printed
    assert shown[-1] == (passes[-1], "", 100)
    percents = [percent for _, _, percent in shown]
    assert percents == sorted(percents)
    assert {title for title, _, percent in shown if percent == 100} == {passes[-1]}
    assert not run_bar._bars


def test_the_bar_of_a_run_that_stops_is_ended(small: Path, monkeypatch: pytest.MonkeyPatch):
    class StoppedError(Exception):
        pass

    def stop(*_args: Any, **_kwargs: Any) -> None:
        raise StoppedError

    monkeypatch.setattr("moe_coverage_plugin.modifiers.channel_pruning.reconstruct_layers", stop)
    bars = []
    original = run_bar.JobBar.close
    monkeypatch.setattr(run_bar.JobBar, "close", lambda bar: (bars.append(bar), original(bar)))
    with pytest.raises(StoppedError):
        compress(small, recommended(), **RUN)
    assert len(bars) == 1
    assert not run_bar._bars
