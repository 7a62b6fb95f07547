"""SIGKILL at 20 random moments of a run: nothing half-written is ever accepted, and a rerun succeeds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from tests.checkpoint.runs import aligned, logits, source

SEED, MOMENTS = 20, 20
STRATA = ("scoring", "planning", "saving")
OUTPUT, SCORES = "out", "kept.bin"
Order = Callable[..., dict[str, Any]]


class Reference(NamedTuple):
    """What a run leaves that nobody killed, and how many seconds each of its phases took."""

    logits: Tensor
    channels_LEI: Tensor
    names: set[str]
    seconds: dict[str, float]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="module")
def order(workspace: Path) -> Iterator[Order]:
    """Has a run made in a process of its own, and killed where asked."""
    model = source(workspace / "model")
    root = str(Path(__file__).parents[2])
    read, write = os.pipe()
    with (workspace / "errors.txt").open("w") as errors:
        program = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_runs.py")), str(write)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            pass_fds=[write],
            env=os.environ | {"PYTHONPATH": root},
            text=True,
        )
    os.close(write)
    answers = os.fdopen(read)

    def send(directory: Path, sharded: bool, kill: tuple[str, float | None] | None = None) -> dict[str, Any]:
        assert program.stdin is not None
        fields = {"source": str(model), "directory": str(directory), "sharded": sharded, "kill": kill}
        program.stdin.write(json.dumps(fields) + "\n")
        program.stdin.flush()
        answer = answers.readline()
        assert answer, (workspace / "errors.txt").read_text()[-4000:]
        return json.loads(answer)

    yield send
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait() == 0
    answers.close()


@pytest.fixture(scope="module")
def references(order: Order, workspace: Path) -> dict[bool, Reference]:
    """A run in one file, and one in several."""
    torch.set_num_threads(1)  # before the fixture that does so for every test
    found = {}
    for sharded in (False, True):
        directory = workspace / f"whole_{sharded}"
        directory.mkdir()
        answer = order(directory, sharded)
        assert answer["succeeded"], (workspace / "errors.txt").read_text()[-4000:]
        output = directory / OUTPUT
        assert (len(list(output.glob("model-*.safetensors"))) > 3) == sharded
        names = {file.name for file in output.iterdir()}
        channels_LEI = load_scores(directory / SCORES)[0].channels_LEI
        found[sharded] = Reference(logits(aligned(load(output))), channels_LEI, names, answer["seconds"])
    assert torch.equal(found[True].logits, found[False].logits)
    return found


def moments(seconds: dict[str, float]) -> list[tuple[str, float | None]]:
    """A quarter anywhere in the run, and the others in each stratum, one of them at its very beginning."""
    # who is done exits before it can be killed, on a busy machine after a while that a moment could fall into
    seconds = {phase: duration for phase, duration in seconds.items() if phase != "done"}
    generator = random.Random(SEED)
    drawn: list[tuple[str, float | None]] = []
    for phase in STRATA:
        drawn.append((phase, None))
        drawn += [(phase, generator.uniform(0, seconds[phase])) for _ in range(MOMENTS // 4 - 1)]
    for _ in range(MOMENTS - len(drawn)):
        moment = generator.uniform(0, sum(seconds.values()))
        begins = dict(zip(seconds, accumulate(seconds.values(), initial=0.0), strict=False))
        phase = [name for name, begin in begins.items() if begin <= moment][-1]
        drawn.append((phase, moment - begins[phase]))
    return drawn


@pytest.fixture(scope="module")
def killed(
    order: Order, references: dict[bool, Reference], workspace: Path
) -> list[tuple[Path, bool, dict[str, Any]]]:
    """Directories of the runs that were killed, whether they save several files, and how they ended."""
    ends = []
    for number in range(MOMENTS):
        directory, sharded = workspace / str(number), bool(number % 2)
        directory.mkdir()
        ends.append((directory, sharded, order(directory, sharded, moments(references[sharded].seconds)[number])))
    return ends


def test_every_run_was_killed_and_every_phase_was_hit(killed: list[tuple[Path, bool, dict[str, Any]]]) -> None:
    assert [end["killed"] for _, _, end in killed] == [True] * MOMENTS
    hit = {end["phase"] for _, _, end in killed}
    assert set(STRATA) <= hit
    left = {path.name.split(".")[-1] for directory, *_ in killed for path in directory.iterdir()}
    assert "partial" in left, "no run died while it wrote"


@pytest.mark.parametrize("number", range(MOMENTS))
def test_what_is_left_is_whole_or_refused_and_a_rerun_succeeds(
    order: Order,
    references: dict[bool, Reference],
    killed: list[tuple[Path, bool, dict[str, Any]]],
    number: int,
    workspace: Path,
) -> None:
    directory, sharded, _ = killed[number]
    output, scores = directory / OUTPUT, directory / SCORES
    for path in directory.iterdir():
        assert path in (output, scores) or path.name.startswith((f".{OUTPUT}.", f".{SCORES}."))
        is_whole = _is_whole_checkpoint if path.is_dir() else _is_whole_score_file
        whole = is_whole(path, references[sharded])
        assert whole or path not in (output, scores), f"{path.name} is under its name and not whole"
    if not output.exists():
        assert order(directory, sharded)["succeeded"], (workspace / "errors.txt").read_text()[-4000:]
        assert {path.name for path in directory.iterdir()} == {OUTPUT, SCORES}, "what the dead run left is gone"
    assert _is_whole_checkpoint(output, references[sharded])
    assert _is_whole_score_file(scores, references[sharded])


def _is_whole_checkpoint(path: Path, reference: Reference) -> bool:
    """Whether a directory opens, and then it answers like the reference; else all who might open it refuse it."""
    try:
        model = load(path)
    except CoverageError:
        # an engine without the entry would take it for an ordinary checkpoint
        assert not (path / "config.json").exists()
        with pytest.raises(CoverageError, match=r"config\.json cannot be read"):
            Manifest.from_checkpoint(path)
        return False
    assert torch.equal(logits(aligned(model)), reference.logits)
    assert {file.name for file in path.iterdir()} == reference.names
    return _is_whole_score_file(path / SCORES_NAME, reference)


def _is_whole_score_file(path: Path, reference: Reference) -> bool:
    """Whether a score file is read, and then it holds what the reference measured."""
    try:
        scores, _ = load_scores(path)
    except CoverageError:
        return False
    assert torch.equal(scores.channels_LEI, reference.channels_LEI)
    return True
