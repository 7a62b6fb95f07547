"""One row of a comparison: what is known before it is measured, and its measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.allocation import rows
from benchmarks.allocation.bench import Bench, open_linear
from benchmarks.allocation.tables import Setting
from benchmarks.allocation.text import Windows
from moe_coverage_plugin.manifest import CoverageError


@dataclass(frozen=True)
class Job:
    """A row to measure: its setting, seed and calibration windows, and the fields that are known beforehand."""

    setting: Setting
    seed: int
    calibration: Windows
    about: Mapping[str, Any]


def open_bench(model: Path, dtype: str, evaluation: dict[str, Windows], device: torch.device, scores: Path) -> Bench:
    """Open the model; see :class:`~benchmarks.allocation.bench.Bench`."""
    pristine = open_linear(model, getattr(torch, dtype), device)
    return Bench(pristine, AutoTokenizer.from_pretrained(model), evaluation, device, scores)


def measured_row(bench: Bench, job: Job) -> rows.Row:
    """Measure one row; an error of this package or of REAP is stored in the row."""
    start = time.perf_counter()
    figures: dict[str, Any] = dict.fromkeys(rows.FIGURES)
    scoring = 0.0
    try:
        if (scores := bench.score_file(job.setting, job.calibration)) is not None:
            scoring = bench.scoring_seconds[scores]
        start = time.perf_counter()
        figures |= asdict(bench.measure(job.setting, job.calibration, job.seed))
    except CoverageError as error:
        figures["refusal"] = str(error)
    except ValueError as error:  # raised by the toolkit's REAP modifier
        if "REAPPruningModifier" not in job.setting.recipe.modifiers:
            raise
        figures["refusal"] = str(error)
    return rows.Row(**job.about, **figures, seconds=time.perf_counter() - start, scoring_seconds=scoring)
