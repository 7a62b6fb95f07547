"""Stores the results of one checkpoint in a JSON file, which is complete after each task."""

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
    """Results of one checkpoint.

    Attributes:
        checkpoint: directory or name on the hub, as given.
        fingerprint: hash of config and weights, to recognize the checkpoint.
        weight_bytes: bytes of its weight files.
        tasks: ``settings``, ``metrics``, ``subtasks``, ``documents``, ``seconds`` and ``versions`` of each task.
    """

    checkpoint: str
    fingerprint: str
    weight_bytes: int
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: str, directory: Path) -> Results:
        """Return empty results of a checkpoint.

        Args:
            checkpoint: directory or name, as given.
            directory: directory of the checkpoint.

        Raises:
            CoverageError: it has no config or no weights.
        """
        if not (config := directory / "config.json").is_file():
            raise CoverageError(f"{directory} is not a checkpoint (it has no config.json): give the directory of one")
        files = weight_files(directory)
        digest = hashlib.sha256(config.read_bytes())
        for file in files:
            _sample(file, digest)
        return cls(checkpoint, digest.hexdigest(), sum(file.stat().st_size for file in files))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file of results.

        Raises:
            CoverageError: the file cannot be read, or is something else.
        """
        try:
            written = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CoverageError(
                f"{path} cannot be read ({error}): give a file written by moe-coverage eval"
            ) from error
        if (
            not isinstance(written, dict)
            or written.get("format") != FORMAT
            or not isinstance(written.get("tasks"), dict)
        ):
            raise CoverageError(f"{path} has no results: give a file written by moe-coverage eval")
        try:
            return cls(**{name: written[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise CoverageError(f"{path} lacks {error}: it is damaged, run the evaluation again") from error

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            CoverageError: it cannot be written.
        """
        written = {"format": FORMAT} | {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_atomically(path, (json.dumps(written, indent=1) + "\n").encode())

    def is_done(self, task: str, settings: Mapping[str, Any]) -> bool:
        """Return whether a task was run with these settings.

        Raises:
            CoverageError: it was run with other settings, and these results must not be overwritten.
        """
        if task not in self.tasks:
            return False
        if changed := differing(self.tasks[task]["settings"], settings):
            raise CoverageError(f"{task} has results with {describe_differences(changed)}: choose another file")
        return True

    def add(self, task: str, settings: Mapping[str, Any], found: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Add the results of a task or group.

        Args:
            task: name of the task or group.
            settings: settings that the numbers depend on.
            found: results as lm-eval returns them.
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
    """Return settings that differ, with both values."""
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    }


def describe_differences(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Describe differing settings for a message: ``limit 100 (not 200)``."""
    return ", ".join(
        "other prompts or data" if name == "identity" else f"{name} {first} (not {second})"
        for name, (first, second) in changed.items()
    )


def _metrics(values: Mapping[str, Any], direction: Mapping[str, bool]) -> dict[str, dict[str, Any]]:
    """Merge ``acc,none`` and ``acc_stderr,none`` of lm-eval into one entry ``acc``; keep names of other filters."""
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
    """Add name, size and three samples of a file; hashing entire files takes minutes."""
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as opened:
        for place in (0, size // 2, max(size - SAMPLE, 0)):
            opened.seek(place, os.SEEK_SET)
            digest.update(opened.read(SAMPLE))
