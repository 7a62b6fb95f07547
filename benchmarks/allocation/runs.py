"""Runs a comparison: plans its rows, and measures and stores those that are missing."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.allocation import rows, tables, text
from benchmarks.allocation.bench import Bench
from benchmarks.allocation.jobs import Job, measured_row, open_bench
from benchmarks.allocation.text import Source, Windows
from benchmarks.allocation.workers import measured_by
from benchmarks.commands import portable
from benchmarks.plan import processor
from moe_coverage_plugin.manifest import CoverageError

OF_THE_RUN = ("--workers", "--scores", "--results")
"""Options that do not change a row, so its stored command leaves them out."""


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison.

    Attributes:
        name: name of the model in tables.
        model: directory of the model.
        calibration: texts to calibrate on.
        evaluation: texts to measure the loss on.
        calibration_windows: windows that each run calibrates on.
        windows: windows of each evaluation text.
        seeds: seeds of the calibration windows; a setting without calibration is measured with the first one only.
        dtype: dtype to compute in.
        tables: regular expression for keys of tables; the unpruned model is always measured.
        own: files of text that the model wrote itself, by ``moe-coverage sample``, one for each seed.
        workers: processes that measure, each with a model of its own; one measures here.
        scores: directory that keeps the measured scores; ``None`` to delete them.
    """

    name: str
    model: Path
    calibration: Sequence[Source]
    evaluation: Sequence[Source]
    calibration_windows: int
    windows: int
    seeds: Sequence[int]
    dtype: str
    tables: str
    own: Sequence[Path] = ()
    workers: int = 1
    scores: Path | None = None


def run(plan: Plan, device: torch.device, results: Path) -> None:
    """Measure the rows that are missing in the results file.

    Raises:
        CoverageError: if a text is too short, or the toolkit would not use ``device``.
    """
    if device.type == "cpu" and torch.accelerator.is_available():
        raise CoverageError(
            "device is cpu, but the toolkit calibrates on the visible accelerator: hide it, for example with "
            "CUDA_VISIBLE_DEVICES="
        )
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    evaluation = text.evaluation_windows(plan.evaluation, plan.calibration, tokenizer, plan.windows)
    common = {
        "model": plan.name,
        "evaluation": "; ".join(windows.description for windows in evaluation.values()),
        "evaluation_sha256": _joint_hash(evaluation.values()),
        "command": portable("benchmarks.allocation", sys.argv[1:], OF_THE_RUN),
        "device": _device_name(device),
        "dtype": plan.dtype,
        "versions": rows.versions(),
    }
    if plan.own and len(plan.own) != len(plan.seeds):
        raise CoverageError(
            f"--own has {len(plan.own)} files, but there are {len(plan.seeds)} seeds: sample one text with each seed"
        )
    own = {seed: text.own_windows(path, tokenizer) for seed, path in zip(plan.seeds, plan.own, strict=False)}
    jobs = plan_jobs(plan, text.calibration_pools(plan.calibration, tokenizer), common, own)
    known = {row.key for row in rows.resume(results)}
    missing = [job for job in jobs if rows.key(job.about) not in known]
    print(f"{len(jobs)} rows, {len(missing)} of them not in {results}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scores = plan.scores or Path(folder)
        scores.mkdir(parents=True, exist_ok=True)
        opened = partial(open_bench, plan.model, plan.dtype, evaluation, device, scores)
        for number, row in enumerate(_measured(missing, opened, scores, plan.workers), 1):
            rows.append_row(results, row)
            found = f"error: {row.refusal}" if row.loss is None else f"loss {row.loss:.4f}"
            print(f"{number}/{len(missing)} {_label(row)} | {found} | {row.seconds:.1f} s", flush=True)


def _measured(jobs: Sequence[Job], opened: Callable[[], Bench], scores: Path, workers: int) -> Iterator[rows.Row]:
    if workers > 1:
        yield from measured_by(workers, jobs, opened, scores)
    elif jobs:
        bench = opened()
        yield from (measured_row(bench, job) for job in jobs)


def _label(row: rows.Row) -> str:
    return f"{row.table} | {row.name} | {row.sparsity:.0%} | {row.bits} bits | seed {row.seed}"


def plan_jobs(
    plan: Plan, pools: dict[str, torch.Tensor], common: Mapping[str, Any], written: Mapping[int, Windows] | None = None
) -> list[Job]:
    """List the rows of the selected tables.

    Args:
        plan: settings of the comparison.
        pools: windows of every calibration text.
        common: fields of model, evaluation and machine, which all rows share.
        written: text of the model itself by seed; without it, rows that need it are left out.
    """
    jobs: list[Job] = []
    drawn: dict[tuple[str, int], Windows] = {}
    for setting in tables.settings(list(pools)):
        if setting.table != tables.UNPRUNED and not re.search(plan.tables, setting.table):
            continue
        writes_text = setting.corpus in tables.WRITTEN
        if writes_text and not written:
            continue
        for seed in plan.seeds if setting.calibrated else plan.seeds[:1]:
            if (setting.corpus, seed) not in drawn and writes_text:
                assert written is not None
                drawn[setting.corpus, seed] = text.draw_own(
                    written[seed], pools, setting.corpus, plan.calibration_windows, seed
                )
            elif (setting.corpus, seed) not in drawn:
                drawn[setting.corpus, seed] = text.draw(pools, setting.corpus, plan.calibration_windows, seed)
            calibration = drawn[setting.corpus, seed]
            own = {
                "table": setting.table,
                "name": setting.name,
                "method": setting.method,
                "sparsity": setting.sparsity,
                "bits": setting.bits,
                "seed": seed,
                "recipe": asdict(setting.recipe),
                "calibration": calibration.description,
                "calibration_sha256": calibration.sha256,
            }
            jobs.append(Job(setting, seed, calibration, {**common, **own}))
    return jobs


def _joint_hash(windows: Iterable[Windows]) -> str:
    return hashlib.sha256("".join(each.sha256 for each in windows).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()} ({platform.machine()}), {torch.get_num_threads()} threads"
