"""Runs of the comparison: rows are stored and not measured twice, and errors are stored as rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.allocation import rows, runs
from benchmarks.allocation.bench import Bench
from benchmarks.allocation.jobs import measured_row
from benchmarks.allocation.render import write_results
from benchmarks.allocation.text import Source, Windows
from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.report.pareto import read_results

pytestmark = pytest.mark.slow

TOPK_ROWS = 7 + 7  # of the unpruned model, and of the pruned one with the only seed


@pytest.fixture
def plan(model_path: Path) -> runs.Plan:
    return runs.Plan(
        name="tiny",
        model=model_path,
        calibration=[Source("calibration", model_path / "calibration.txt")],
        evaluation=[Source("heldout", model_path / "heldout.txt")],
        calibration_windows=2,
        windows=1,
        seeds=range(2),
        dtype="float32",
        tables="^topk$",
    )


def test_an_interrupted_run_is_continued(plan: runs.Plan, tmp_path: Path):
    results, plan = tmp_path / "out" / "rows.jsonl", replace(plan, seeds=range(1))
    runs.run(plan, torch.device("cpu"), results)
    complete = results.read_text().splitlines()
    assert len(complete) == TOPK_ROWS + 1
    found = rows.read_rows(results)
    losses = {(row.name, row.sparsity): row.loss for row in found}
    assert losses["unpruned: K", 0.0] == losses["unpruned", 0.0]
    assert losses["unpruned: 1", 0.0] != losses["unpruned", 0.0]
    assert {row.removed for row in found if row.method == "recommended"} == {0.25}

    # interrupted while the last row was written
    results.write_text("\n".join(complete[:-1]) + "\n" + complete[-1][:40])
    runs.run(plan, torch.device("cpu"), results)
    again = results.read_text().splitlines()
    assert again[:-1] == complete[:-1]
    assert json.loads(again[-1])["loss"] == json.loads(complete[-1])["loss"]
    # another seed draws other calibration windows, so it is another row
    runs.run(replace(plan, tables="^$", seeds=[2]), torch.device("cpu"), results)
    assert len(results.read_text().splitlines()) == TOPK_ROWS + 2

    assert len(read_results(results)) == TOPK_ROWS + 2
    write_results([results], tmp_path / "RESULTS.md")
    assert "| recommended: K/2" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("paper: a=128 l-r-c", "block size 128 does not divide the 192 channels of an expert"),
        ("recommended: a=256 blocks", "block size 256 does not divide the 192 channels of an expert"),
    ],
)
def test_an_error_is_stored_as_a_row(
    bench: Bench, calibration: Windows, plan: runs.Plan, tmp_path: Path, name: str, message: str
):
    jobs = runs.plan_jobs(replace(plan, tables="^alignment$"), {"calibration": calibration.ids_WS}, common(plan))
    row = measured_row(bench, next(job for job in jobs if job.setting.name == name))
    assert row.loss is None
    assert row.refusal is not None
    assert message in row.refusal
    rows.append_row(tmp_path / "rows.jsonl", row)
    assert rows.resume(tmp_path / "rows.jsonl") == [row]
    assert not (tmp_path / "rows.jsonl").exists()


def common(plan: runs.Plan) -> dict[str, Any]:
    """Fields that all rows of a run share."""
    same = dict.fromkeys(("evaluation", "evaluation_sha256", "command", "device"), "")
    return {"model": plan.name, "dtype": plan.dtype, "versions": {}} | same


def test_each_seed_calibrates_on_windows_of_its_own(plan: runs.Plan):
    pools = {"calibration": torch.arange(20 * 512).reshape(20, 512)}
    jobs = runs.plan_jobs(replace(plan, tables="^main$"), pools, common(plan))
    unpruned, *calibrated = jobs
    hashes = {job.seed: job.calibration.sha256 for job in calibrated}
    assert len(hashes) == len(set(hashes.values())) == 2
    assert len({rows.key(job.about) for job in jobs}) == len(jobs)
    assert len(calibrated) == 2 * len({(job.setting.name, job.setting.sparsity) for job in calibrated})
    assert unpruned.seed == 0


def test_rows_of_own_text(plan: runs.Plan):
    pools = {name: torch.arange(20 * 512).reshape(20, 512) for name in ("c4", "wiki")}
    own = {seed: Windows(-torch.arange(1, 5 * 512 + 1).reshape(5, 512) - 10_000 * seed, "own") for seed in plan.seeds}
    plan = replace(plan, tables="^own$", calibration_windows=4)
    assert {job.setting.corpus for job in runs.plan_jobs(plan, pools, common(plan))} == {"all"}
    jobs = runs.plan_jobs(plan, pools, common(plan), own)
    for corpus, written in (("own", 4), ("own, entire", 5), ("own and all", 2), ("all", 0)):
        for seed in plan.seeds:
            (ids_WS,) = {
                job.calibration.sha256: job.calibration.ids_WS
                for job in jobs
                if (job.setting.corpus, job.seed) == (corpus, seed) and job.setting.calibrated
            }.values()
            assert (ids_WS < 0).all(-1).sum() == written
            assert len(ids_WS) == (5 if corpus == "own, entire" else 4)
    assert len({rows.key(job.about) for job in jobs}) == len(jobs)
    with pytest.raises(CoverageError, match="has 5 windows of 512 tokens, but 6 are needed"):
        runs.plan_jobs(replace(plan, calibration_windows=6), pools, common(plan), own)


def test_several_processes_measure_what_one_measures(plan: runs.Plan, tmp_path: Path):
    """Rows with scores, without them, and with an error."""
    plan = replace(plan, tables="^(main|alignment)$", seeds=range(1))
    measured = {}
    for workers in (1, 2):
        results = tmp_path / f"{workers}.jsonl"
        runs.run(replace(plan, workers=workers), torch.device("cpu"), results)
        measured[workers] = {row.key: (row.loss, row.bytes, row.refusal) for row in rows.read_rows(results)}
        assert len(measured[workers]) == len(rows.read_rows(results))
    assert measured[1] == measured[2]
    assert {refusal is None for _, _, refusal in measured[2].values()} == {True, False}
    scored = {
        row.scoring_seconds for row in rows.read_rows(results) if "AttributionModifier" in row.recipe["modifiers"]
    }
    assert min(scored) > 0
