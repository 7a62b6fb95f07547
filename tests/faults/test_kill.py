"""SIGKILL at 8 random moments of a run: no partial checkpoint is opened, and a second run succeeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME
from tests import processes
from tests.checkpoint.runs import aligned, logits, source

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]

SEED, MOMENTS = 20, 8
STRATA = ("scoring", "planning", "saving")
OUTPUT, SCORES = "out", "kept.safetensors"
Order = Callable[..., dict[str, Any]]


class Reference(NamedTuple):
    """Results of a run that was not killed, and the seconds of each of its phases."""

    logits: Tensor
    channels_LEI: Tensor
    names: set[str]
    seconds: dict[str, float]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="module")
def order(workspace: Path) -> Order:
    """Function that makes a run in a process of its own and kills it if requested."""
    model = source(workspace / "model")

    def make(directory: Path, sharded: bool, kill: tuple[str, float | None] | None = None) -> dict[str, Any]:
        fields = {"source": str(model), "directory": str(directory), "sharded": sharded, "kill": kill}
        done = processes.run("-m", "tests.faults.forked_runs", json.dumps(fields), cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]) | {"errors": done.stderr[-4000:]}

    return make


@pytest.fixture(scope="module")
def references(order: Order, workspace: Path) -> dict[bool, Reference]:
    """A run that saves one weight file, and one that saves several."""
    torch.set_num_threads(1)  # the fixture that sets it for every test runs later
    found = {}
    for sharded in (False, True):
        directory = workspace / f"complete_{sharded}"
        directory.mkdir()
        result = order(directory, sharded)
        assert result["succeeded"], result["errors"]
        output = directory / OUTPUT
        assert (len(list(output.glob("model-*.safetensors"))) > 3) == sharded
        names = files_in(output)
        channels_LEI = load_scores(directory / SCORES)[0].channels_LEI
        found[sharded] = Reference(logits(aligned(load(output))), channels_LEI, names, result["seconds"])
    assert torch.equal(found[True].logits, found[False].logits)
    return found


def files_in(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*")}


def moments(seconds: dict[str, float]) -> list[tuple[str, float | None]]:
    """Draw moments: a quarter in the entire run, and a quarter in each stratum, one of them at its beginning."""
    # a run that is done can end before it is killed
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
    """For each killed run: its directory, whether it saves several weight files, and how it ended."""
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
    assert "partial" in left, "no run was killed while it wrote"


@pytest.mark.parametrize("number", range(MOMENTS))
def test_directories_are_complete_or_not_opened_and_a_second_run_succeeds(
    order: Order,
    references: dict[bool, Reference],
    killed: list[tuple[Path, bool, dict[str, Any]]],
    number: int,
) -> None:
    directory, sharded, _ = killed[number]
    output, scores = directory / OUTPUT, directory / SCORES
    for path in directory.iterdir():
        assert path in (output, scores) or path.name.startswith((f".{OUTPUT}.", f".{SCORES}."))
        is_complete = _is_complete_checkpoint if path.is_dir() else _is_complete_score_file
        complete = is_complete(path, references[sharded])
        assert complete or path not in (output, scores), f"{path.name} has its final name and is not complete"
    if not output.exists():
        result = order(directory, sharded)
        assert result["succeeded"], result["errors"]
        assert {path.name for path in directory.iterdir()} == {OUTPUT, SCORES}, "what the killed run left is removed"
    assert _is_complete_checkpoint(output, references[sharded])
    assert _is_complete_score_file(scores, references[sharded])


def _is_complete_checkpoint(path: Path, reference: Reference) -> bool:
    """Return whether load() opens a directory, which must then equal the reference; otherwise no reader opens it."""
    try:
        model = load(path)
    except CoverageError:
        # an engine without the entry would take it for an ordinary checkpoint
        assert not (path / "config.json").exists()
        with pytest.raises(CoverageError, match=r"config\.json cannot be read"):
            Manifest.from_checkpoint(path)
        return False
    assert torch.equal(logits(aligned(model)), reference.logits)
    assert files_in(path) == reference.names
    return _is_complete_score_file(path / SCORES_NAME, reference)


def _is_complete_score_file(path: Path, reference: Reference) -> bool:
    """Return whether a score file is read; it must then equal the reference."""
    try:
        scores, _ = load_scores(path)
    except CoverageError:
        return False
    assert torch.equal(scores.channels_LEI, reference.channels_LEI)
    return True
