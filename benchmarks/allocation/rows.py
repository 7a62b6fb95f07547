"""Measured rows: what one holds, and the files that keep them.

Rows are lines of JSON. What hundreds of them say alike (machine, versions, command, texts) stands once in a file of
runs beside them, and a row holds its key there.
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
FIGURES = ("bytes", "sparse_bytes", "loss", "losses", "refusal", "removed", "removed_experts")
Key = tuple[object, ...]


@dataclass(frozen=True)
class Row:
    """One setting, measured or refused.

    Attributes:
        bytes: payload of the checkpoint, ``None`` where refused.
        sparse_bytes: the same if zeroed expert weights cost one bit each; only for unstructured pruning.
        loss: mean over the evaluation texts of the mean next-token loss, nats; ``None`` where refused.
        losses: by evaluation text.
        refusal: why there is no loss, in the words of the product or of the toolkit.
        removed: fraction of the expert channels that is gone.
        removed_experts: experts that are gone whole.
        recipe: fields of :class:`benchmarks.allocation.recipes.Recipe`.
        seconds: compressing and measuring; ``scoring_seconds``: measuring the scores, once for all rows that use them.
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

    @property
    def key(self) -> Key:
        """Rows of equal key are the same measurement."""
        return key(vars(self))


def key(about: Mapping[str, Any]) -> Key:
    """What tells a row from all others, known before it is measured."""
    return tuple(about[name] for name in IDENTITY)


def refusals(path: Path) -> Path:
    """The file beside ``path`` for refused rows: readers of results want a size and a loss in every line."""
    return path.with_suffix(".refused.jsonl")


def runs_file(path: Path) -> Path:
    """The file beside ``path`` for what rows say alike."""
    return path.with_suffix(".runs.json")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file and of the refusals beside it, none where there is no file."""
    runs = _read_runs(path)
    files = [file for file in (path, refusals(path)) if file.exists()]
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [Row(**runs[line.pop("run")], **line) for line in lines]


def resume(path: Path) -> list[Row]:
    """Rows measured so far; a line that a killed run left unfinished is taken away."""
    for file in (path, refusals(path)):
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    return read_rows(path)


def append_row(path: Path, row: Row) -> None:
    """Add a row as one line, to the refusals where it is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = asdict(row)
    run = {name: line.pop(name) for name in OF_A_RUN}
    target = path if row.refusal is None else refusals(path)
    # the run first: a row must never stand alone
    line["run"] = _keep_run(path, run)
    with target.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _keep_run(path: Path, run: dict[str, Any]) -> str:
    """The key of a run, which is kept where it is new."""
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
    """Versions of what computes."""
    return {package: version(package) for package in PACKAGES}
