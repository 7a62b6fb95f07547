"""Every reader of a damaged file returns the content of the original or raises CoverageError."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.manifest import INDEX_NAME, read_json
from tests.faults.fuzz_targets import TARGETS

EXAMPLES = 300


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", TARGETS)
def test_readers_of_damaged_files(workspace: Path, name: str) -> None:
    outcomes: set[bool] = set()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(st.binary(min_size=4, max_size=64))
    def run(data: bytes) -> None:
        outcomes.add(TARGETS[name](workspace, data))

    run()
    # a reader that stops at every file would pass otherwise; of a score file every byte counts
    assert outcomes >= ({False} if name == "scores" else {True, False})


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("manifest", "moe_coverage_plugin.manifest.checksum"),
        ("manifest", "moe_coverage_plugin.manifest.Manifest._check_types"),
        ("index", "moe_coverage_plugin.files.weights._indexed_names"),
        ("scores", "moe_coverage_plugin.files.scores._check_digest"),
        ("forged_scores", "moe_coverage_plugin.files.scores._check_shapes"),
    ],
)
def test_a_reader_without_a_check_fails(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, name: str, check: str
) -> None:
    """Shows that the damage is sufficient: a reader without one of its checks fails the test."""
    without = {
        "checksum": lambda entry: entry.get("sha256"),
        "_indexed_names": lambda directory: list(read_json(directory / INDEX_NAME)["weight_map"].values()),
    }
    monkeypatch.setattr(check, without.get(check.rpartition(".")[2], lambda *_: None))
    generator = random.Random(0)
    examples = [generator.randbytes(48) for _ in range(4 * EXAMPLES)]
    with pytest.raises((AssertionError, AttributeError, LookupError, TypeError, ValueError)):
        list(map(TARGETS[name], [workspace] * len(examples), examples))
