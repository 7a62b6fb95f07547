"""Measured checkpoints: reads them from a file and averages repetitions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_coverage_plugin.manifest import CoverageError


@dataclass(frozen=True)
class ResultRow:
    """One measured checkpoint; rows that differ only in seed, bytes and loss are repetitions.

    Attributes:
        name: of the checkpoint.
        method: how it was made; decides the colour in the picture.
        bytes: size of the checkpoint, at least 1.
        loss: held-out loss, in nats per token.
        sparsity: removed fraction of the expert channels.
        bits: bits of a weight.
        model: the model that was compressed.
        seed: of the repetition.
    """

    name: str
    method: str
    bytes: int
    loss: float
    sparsity: float | None = None
    bits: float | None = None
    model: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Repeated:
    """Mean of the repetitions of one result; fields not listed are those of :class:`ResultRow`.

    Attributes:
        bytes: mean size.
        loss: mean loss.
        spread: sample standard deviation of the loss; 0 for a single row.
        count: number of repetitions.
    """

    name: str
    method: str
    model: str | None
    sparsity: float | None
    bits: float | None
    bytes: float
    loss: float
    spread: float
    count: int


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "name": ((str,), "text"),
    "method": ((str,), "text"),
    "bytes": ((int,), "a whole number, at least 1"),
    "loss": ((int, float), "a number"),
    "sparsity": ((int, float), "a number"),
    "bits": ((int, float), "a number"),
    "model": ((str,), "text"),
    "seed": ((int,), "a whole number"),
}
_NEEDED = ("name", "method", "bytes", "loss")


def read_results(path: str | Path) -> list[ResultRow]:
    """Read JSON lines, each an object with the fields of :class:`ResultRow`; other keys and empty lines are skipped.

    Args:
        path: file of JSON lines.

    Returns:
        One row per line, in order.

    Raises:
        CoverageError: the file cannot be read, or a line is damaged; the message names the line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise CoverageError(f"results {path} cannot be read ({error.strerror}): name a file of JSON lines") from error
    if _is_evaluation(content):
        raise CoverageError(
            f"{path} was written by moe-coverage eval: give JSON lines, each with {', '.join(_NEEDED)} of a checkpoint"
        )
    lines = content.split(b"\n")
    return [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _is_evaluation(content: bytes) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "tasks" in found


def _parse(line: bytes, where: str) -> ResultRow:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CoverageError(f"{where} is not JSON: write one object per line, or remove the line") from error
    if not isinstance(entry, dict):
        raise CoverageError(f"{where} is {_shown(entry)}, not an object: write one object per line")
    if missing := [key for key in _NEEDED if key not in entry]:
        raise CoverageError(f"{where} lacks {', '.join(missing)}: every result needs {', '.join(_NEEDED)}")
    given = [key for key in _KINDS if key in _NEEDED or entry.get(key) is not None]
    return ResultRow(**{key: _field(entry[key], key, where) for key in given})


def _field(value: Any, key: str, where: str) -> Any:
    kinds, wanted = _KINDS[key]
    if not isinstance(value, kinds) or isinstance(value, bool) or (key == "bytes" and value < 1):
        raise CoverageError(f"{where} has {key} {_shown(value)}, expected {wanted}: correct or remove the line")
    if not isinstance(value, str) and not abs(value) < sys.float_info.max:
        raise CoverageError(f"{where} has {key} {_shown(value)}, expected a finite number: correct or remove the line")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def mean_of_repetitions(rows: Sequence[ResultRow]) -> list[Repeated]:
    """Average the repetitions of every result, in the order in which results first occur."""
    groups: dict[tuple, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.name, row.method, row.model, row.sparsity, row.bits), []).append(row)
    means = []
    for (name, method, model, sparsity, bits), members in groups.items():
        losses = np.array([row.loss for row in members], dtype=np.float64)
        spread = float(losses.std(ddof=1)) if len(members) > 1 else 0.0
        size = float(np.mean([float(row.bytes) for row in members]))
        means.append(Repeated(name, method, model, sparsity, bits, size, float(losses.mean()), spread, len(members)))
    return means
