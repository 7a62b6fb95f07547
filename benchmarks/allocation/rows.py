"""Measured rows, and the files in which they are stored.

Rows are lines of JSON. The settings that many rows share (machine, versions, command, texts) are stored once, in a
file of runs beside the rows; each row has the key of its run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.atomic import write_atomically

PACKAGES = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "torch")
IDENTITY = ("model", "table", "name", "sparsity", "bits", "seed", "calibration_sha256", "evaluation_sha256", "dtype")
OF_A_RUN = (
    *("calibration", "calibration_sha256", "evaluation", "evaluation_sha256"),
    *("command", "device", "dtype", "versions"),
)
FIGURES = ("bytes", "sparse_bytes", "loss", "losses", "divergences", "refusal", "removed", "removed_experts")
Key = tuple[object, ...]


@dataclass(frozen=True)
class Row:
    """One setting and its measurement, or the error that prevented it.

    Attributes:
        model: name of the model.
        table: key of the table.
        name: label of the row in its table.
        method: name of the method; rows of one method form a curve over bytes.
        sparsity: fraction to remove.
        bits: bits of a weight.
        seed: seed of the calibration windows.
        bytes: bytes of all tensors of the checkpoint, ``None`` after an error.
        sparse_bytes: the same if expert weights that are zero took one bit each; only for unstructured pruning.
        loss: mean over the evaluation texts of the mean next-token loss in nats, ``None`` after an error.
        losses: loss of each evaluation text.
        refusal: message of the error, ``None`` if the row was measured.
        removed: removed fraction of the expert channels.
        removed_experts: number of removed experts.
        recipe: fields of :class:`benchmarks.allocation.recipes.Recipe`.
        calibration: description of the calibration windows.
        calibration_sha256: hash of their token ids.
        evaluation: description of the evaluation windows.
        evaluation_sha256: hash of their token ids.
        command: the command that measured the row.
        device: name of the device.
        dtype: dtype to compute in.
        versions: of the packages that compute, by name.
        seconds: time to compress and to measure.
        scoring_seconds: time to measure the scores, which several rows may share.
        divergences: mean Kullback-Leibler divergence of the predictions from those of the unpruned model, nats, for
            each evaluation text; older rows lack it.
    """

    model: str
    table: str
    name: str
    method: str
    sparsity: float
    bits: int
    seed: int
    bytes: int | None
    sparse_bytes: int | None
    loss: float | None
    losses: dict[str, float] | None
    refusal: str | None
    removed: float | None
    removed_experts: int | None
    recipe: dict[str, Any]
    calibration: str
    calibration_sha256: str
    evaluation: str
    evaluation_sha256: str
    command: str
    device: str
    dtype: str
    versions: dict[str, str]
    seconds: float
    scoring_seconds: float
    divergences: dict[str, float] | None = None

    @property
    def key(self) -> Key:
        """The identity of the measurement."""
        return key(vars(self))


def key(about: Mapping[str, Any]) -> Key:
    """Return the identity of a row, which is known before it is measured."""
    return tuple(about[name] for name in IDENTITY)


def refusals(path: Path) -> Path:
    """Return the file for rows with an error: readers of ``path`` require bytes and a loss in every line."""
    return path.with_suffix(".refused.jsonl")


def runs_file(path: Path) -> Path:
    """Return the file for the settings that rows share."""
    return path.with_suffix(".runs.json")


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file and those with an error; none if the files do not exist."""
    runs = _read_runs(path)
    files = [file for file in (path, refusals(path)) if file.exists()]
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [Row(**runs[line.pop("run")], **line) for line in lines]


def resume(path: Path) -> list[Row]:
    """Read the rows measured so far, and remove an incomplete last line of an interrupted run."""
    for file in (path, refusals(path)):
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    return read_rows(path)


def append_row(path: Path, row: Row) -> None:
    """Append a row as one line, to ``path`` or to the file for rows with an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = asdict(row)
    run = {name: line.pop(name) for name in OF_A_RUN}
    target = path if row.refusal is None else refusals(path)
    # the run is written before the row that refers to it
    line["run"] = _keep_run(path, run)
    with target.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _keep_run(path: Path, run: dict[str, Any]) -> str:
    """Return the key of a run, and store the run if it is new."""
    key = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    runs = _read_runs(path)
    if key not in runs:
        text = json.dumps({**runs, key: run}, indent=1)
        write_atomically(runs_file(path), (text + "\n").encode())
    return key


def _read_runs(path: Path) -> dict[str, dict[str, Any]]:
    file = runs_file(path)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def versions() -> dict[str, str]:
    """Versions of the packages that compute."""
    return {package: version(package) for package in PACKAGES}
