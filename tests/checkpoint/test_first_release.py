"""Checkpoints of the first release, which has other names for files and keys, are opened by every reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_coverage_plugin import Manifest, load, load_scores
from moe_coverage_plugin.cli import main
from moe_coverage_plugin.files.scores import copy_scores, find_scores
from moe_coverage_plugin.manifest import REPORT_NAME, SCORES_NAME
from tests.checkpoint.first_release import FIRST_SCORES_NAME, as_first_release
from tests.checkpoint.runs import config_json, logits, prune, source, tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("releases")
    prune(source(directory / "model"), directory / "out", quantize=True)
    return directory / "out"


@pytest.fixture(scope="module")
def first(present: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_first_release(present, tmp_path_factory.mktemp("first") / "out")


def json_of(command: str, path: Path, folder: Path, *options: str) -> dict[str, Any]:
    output = folder / f"{path.parent.name}.json"
    assert main([command, str(path), "--json", str(output), *options]) == 0
    return json.loads(output.read_text())


def test_load_and_save_again(present: Path, first: Path, tmp_path: Path) -> None:
    newer = Manifest.from_checkpoint(present)
    assert newer is not None
    assert newer.contents
    assert newer.tokens.keys() == newer.widths.keys()
    # the first release wrote no record of its tensors, and tokens into its report only
    assert Manifest.from_checkpoint(first) == replace(newer, contents={}, tokens={})
    model = load(first)
    assert torch.equal(logits(model), logits(load(present)))
    again, expected = tmp_path / "first" / "out", tmp_path / "present" / "out"
    model.save_pretrained(again)
    load(present).save_pretrained(expected)
    assert config_json(again) == config_json(expected)
    assert tensors(again).keys() == tensors(expected).keys()
    assert {file.name for file in again.iterdir()} == {file.name for file in expected.iterdir()}
    reports = [json.loads((path / REPORT_NAME).read_text()) for path in (again, expected)]
    assert reports[0].keys() == reports[1].keys()
    assert reports[0]["layers"] == reports[1]["layers"]
    assert (again / "README.md").read_text() == (expected / "README.md").read_text()


def test_inspect(present: Path, first: Path, tmp_path: Path) -> None:
    found, expected = (json_of("inspect", path, tmp_path) | {"checkpoint": ""} for path in (first, present))
    # without tokens in the entry, engines place experts by widths alone
    work = [each.pop("expert_parallel")["balance"]["2"]["work"] for each in (found, expected)]
    assert [ratio is None for ratio in work] == [True, False]
    assert found == expected
    assert found["remarks"] == []
    assert main(["inspect", str(first), "--pictures", str(tmp_path / "pictures")]) == 0


def test_plan(present: Path, first: Path, tmp_path: Path) -> None:
    options = ("--sparsity", "0.5", "--block-size", "32")
    found = json_of("plan", first / FIRST_SCORES_NAME, tmp_path, *options)
    assert found | {"scores": ""} == json_of("plan", present / SCORES_NAME, tmp_path, *options) | {"scores": ""}


def test_scores_are_found_and_copied_to_the_new_place(present: Path, first: Path, tmp_path: Path) -> None:
    assert find_scores(first) == first / FIRST_SCORES_NAME
    assert find_scores(present) == present / SCORES_NAME
    copy_scores(first, tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == [SCORES_NAME]
    (found, provenance), (expected, other) = load_scores(tmp_path / SCORES_NAME), load_scores(present / SCORES_NAME)
    assert provenance == other
    assert torch.equal(found.routing_weight_sum_LE, expected.routing_weight_sum_LE)
    assert torch.equal(found.channels_LEI, expected.channels_LEI)


def test_a_checkpoint_without_scores(tmp_path: Path) -> None:
    assert find_scores(tmp_path) is None
    copy_scores(tmp_path, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
