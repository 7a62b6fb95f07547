"""The results of one checkpoint as a JSON file that is complete after every task."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.files.weights import weight_files
from moe_coverage_plugin.manifest import CoverageError

FORMAT = 1
SAMPLE = 2**20
NO_FILTER = "none"


@dataclass
class Results:
    """What was measured on one checkpoint.

    Args:
        checkpoint: its directory or name, as given.
        fingerprint: tells whether a directory still holds the same checkpoint.
        weight_bytes: bytes of its weight files.
        tasks: of each task ``settings``, ``metrics``, ``subtasks``, ``documents``, ``seconds`` and ``versions``.
    """

    checkpoint: str
    fingerprint: str
    weight_bytes: int
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: str, directory: Path) -> Results:
        """No results yet of a checkpoint.

        Raises:
            CoverageError: no config or no weights.
        """
        if not (config := directory / "config.json").is_file():
            raise CoverageError(f"{directory} is no checkpoint (no config.json): give the directory of one")
        files = weight_files(directory)
        digest = hashlib.sha256(config.read_bytes())
        for file in files:
            _sample(file, digest)
        return cls(checkpoint, digest.hexdigest(), sum(file.stat().st_size for file in files))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file of results.

        Raises:
            CoverageError: it cannot be read, or is something else.
        """
        try:
            written = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CoverageError(
                f"{path} cannot be read ({error}): give a file that moe-coverage eval wrote"
            ) from error
        if (
            not isinstance(written, dict)
            or written.get("format") != FORMAT
            or not isinstance(written.get("tasks"), dict)
        ):
            raise CoverageError(f"{path} holds no results: give a file that moe-coverage eval wrote")
        try:
            return cls(**{name: written[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise CoverageError(f"{path} lacks {error}: it is damaged, run the evaluation again") from error

    def write(self, path: Path) -> None:
        """Write the file, complete or not at all.

        Raises:
            CoverageError: it cannot be written.
        """
        written = {"format": FORMAT} | {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_atomically(path, (json.dumps(written, indent=1) + "\n").encode())

    def is_done(self, task: str, settings: Mapping[str, Any]) -> bool:
        """Whether a task was run with these settings.

        Raises:
            CoverageError: it was run with others, whose numbers must not be lost.
        """
        if task not in self.tasks:
            return False
        if changed := differing(self.tasks[task]["settings"], settings):
            raise CoverageError(f"{task} is there with {told(changed)}: choose another file for the results")
        return True

    def add(self, task: str, settings: Mapping[str, Any], found: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Take over what lm-eval returned for a task or group.

        Args:
            task: its name.
            settings: what its numbers depend on.
            found: lm-eval's results.
            rest: further facts to store.
        """
        direction = found.get("higher_is_better", {})
        metrics = {name: _metrics(values, direction.get(name) or {}) for name, values in found["results"].items()}
        self.tasks[task] = {
            "settings": dict(settings),
            "metrics": metrics.pop(task, {}),
            "subtasks": metrics,
            "documents": sum(counts["effective"] for counts in found["n-samples"].values()),
            "few_shot": sorted({int(shots) for shots in found["n-shot"].values()}),
            **rest,
        }


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not alike, with both values."""
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    }


def told(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """``limit 100 (not 200)``, for a message."""
    return ", ".join(
        "other prompts or data" if name == "identity" else f"{name} {first} (not {second})"
        for name, (first, second) in changed.items()
    )


def _metrics(values: Mapping[str, Any], direction: Mapping[str, bool]) -> dict[str, dict[str, Any]]:
    """``acc,none`` and ``acc_stderr,none`` of lm-eval as one entry ``acc``; other filters stay in the name."""
    metrics = {}
    for key, value in values.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{chosen}")
        metrics[metric if chosen == NO_FILTER else f"{metric}, {chosen}"] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, (int, float)) else None,
            "higher_is_better": direction.get(metric),
        }
    return metrics


def _sample(file: Path, digest: Any) -> None:
    """Name, size and three pieces of a file: whole ones take minutes."""
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as opened:
        for place in (0, size // 2, max(size - SAMPLE, 0)):
            opened.seek(place, os.SEEK_SET)
            digest.update(opened.read(SAMPLE))
