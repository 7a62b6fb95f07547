"""Field cases 2.14 and 2.16: ``load`` and ``moe-coverage inspect`` say of every changed checkpoint what vLLM says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.cli import main
from tests.checkpoint.bases import make_base
from tests.mutations import ALL, Mutation, cases, mutated

pytestmark = pytest.mark.slow

CASES = list(cases())
LIMIT_S = 2.0


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    return {name: make_base(name, directory) for name in ALL}


def check(mutation: Mutation, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that both readers open a checkpoint, or stop soon with one line that the table describes."""
    capsys.readouterr()
    start = time.process_time()
    if mutation.message is None:
        load(directory)
        assert main(["inspect", str(directory)]) == 0
        return
    with pytest.raises(CoverageError, match=mutation.message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    capsys.readouterr()
    assert main(["inspect", str(directory)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    # the same sentence, from the same function
    assert printed.err.strip().endswith(str(caught.value))
    assert time.process_time() - start < LIMIT_S


@pytest.mark.parametrize(("mutation", "base"), CASES, ids=[f"{mutation.name}-{base}" for mutation, base in CASES])
def test_both_readers_give_the_verdict_of_the_table(
    mutation: Mutation, base: str, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(mutation, mutated(mutation, bases[base], tmp_path / "copy"), capsys)


FIRST = list(cases(recorded=False))


@pytest.mark.parametrize(("mutation", "base"), FIRST, ids=[f"{mutation.name}-{base}" for mutation, base in FIRST])
def test_structure_alone_finds_it_in_checkpoints_without_a_record(
    mutation: Mutation, base: str, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of release 0.1 have no record of their contents."""
    check(mutation, mutated(mutation, bases[base], tmp_path / "copy", recorded=False), capsys)


@pytest.mark.parametrize("name", [*ALL, "uniform", "uniform_w4a16", "uniform_fp8", "shared_padded"])
def test_inspect_shows_the_report_of_a_fresh_checkpoint(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Field case 2.17: the report of a padded checkpoint has the widths that were kept, not those that are stored."""
    path = bases.get(name) or make_base(name, tmp_path)
    assert main(["inspect", str(path), "--json", str(tmp_path / "summary.json")]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["remarks"] == []
    for layer in summary["layers"]:
        assert layer["coverage"] is not None
        assert len(layer["tokens"]) == len(layer["widths"])


def test_the_table_is_as_large_as_it_says() -> None:
    changes = {mutation.name for mutation, _ in CASES if mutation.message is not None}
    assert len(changes) >= 60
    assert len({mutation.name for mutation, _ in CASES}) == len({id(mutation) for mutation, _ in CASES})
