"""The measured phases of a job, in a JSON file that is written again after each of them."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch

from benchmarks.plan import processor
from benchmarks.resident import reset_peak, resident
from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError

PACKAGES = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "torch", "triton")
SECONDS_BETWEEN_WRITES, SECONDS_BETWEEN_SAMPLES = 5.0, 0.05
# of runs that are in one file
COMMON = ("shape", "config", "length", "seed")


class Recorder:
    """Measures the phases of one run and writes them, with earlier runs of the same model, into a file.

    A phase is in the file as soon as it starts, and again every few seconds while it reports progress, so that a run
    that is killed leaves what it has measured and how far it got. Several processes can write into one file at once:
    each one reads the file again and replaces its own run in it.
    """

    def __init__(self, file: Path, settings: dict[str, Any], run: dict[str, Any], directory: Path):
        """Add a run to a file.

        Args:
            file: the JSON file; runs of the same model, length and seed are kept.
            settings: see :data:`COMMON`.
            run: what is special about this run: job, command, samples.
            directory: whose files count as written.

        Raises:
            CoverageError: the file has runs of another model.
        """
        self._file, self._directory = file, directory
        self._settings = settings
        self._run = run | {"id": uuid4().hex, "environment": environment(), "phases": []}
        self._spans: list[list[Any]] = []
        self._written_at = 0.0
        self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; inside another one, it is a part of that.

        Time, GPU memory (``max_memory_allocated`` and ``max_memory_reserved``, reset at the start), the peak of
        resident memory (``VmHWM``, reset at the start), that of anonymous memory (sampled), and by how much the files
        in the directory have grown.
        """
        if self._spans:
            with self.part(name):
                yield
            return
        gc.collect()
        before = tree_bytes(self._directory)
        entry: dict[str, Any] = {"name": name, "done": False, "seconds": 0.0, "parts": {}}
        if not reset_memory():
            entry["host_peak_of"] = "the process"
        self._run["phases"].append(entry)
        anonymous = AnonymousSampler()
        anonymous.start()
        self._begin(entry["parts"])
        self._write()
        try:
            yield
            entry["done"] = True
        except BaseException as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            start, _, inside = self._spans.pop()
            entry["seconds"] = clock() - start
            entry["parts"] = {key: part for key, part in entry["parts"].items() if part["seconds"] >= 1e-3}
            if entry["parts"]:
                entry["parts"]["rest"] = {"calls": 1, "seconds": entry["seconds"] - inside}
            entry |= memory() | {
                "host_anonymous_bytes": anonymous.stop(),
                "written_bytes": max(0, tree_bytes(self._directory) - before),
            }
            self._write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of a part to the current phase, without the time of parts inside it."""
        if not self._spans:
            yield
            return
        parts = self._spans[-1][1]
        self._begin(parts)
        try:
            yield
        finally:
            start, _, inside = self._spans.pop()
            seconds = clock() - start
            self._spans[-1][2] += seconds
            part = parts.setdefault(name, {"calls": 0, "seconds": 0.0})
            part["calls"] += 1
            part["seconds"] += seconds - inside

    def progress(self, done: int, of: int) -> None:
        """Report how far the current phase is."""
        entry = self._run["phases"][-1]
        entry["progress"] = [done, of]
        if self._spans and time.monotonic() > self._written_at + SECONDS_BETWEEN_WRITES:
            entry["seconds"] = time.monotonic() - self._spans[0][0]
            entry |= memory()
            self._write()

    def progress_by_one(self, of: int) -> None:
        """Report that the current phase has finished one more of its steps."""
        self.progress(min(self._run["phases"][-1].get("progress", [0])[0] + 1, of), of)

    def note(self, **values: Any) -> None:
        """Add values to the run."""
        self._run |= values
        self._write()

    def add(self, phase: dict[str, Any]) -> None:
        """Add a phase that another process has measured."""
        self._run["phases"].append(phase)
        self._write()

    def _begin(self, parts: dict[str, Any]) -> None:
        self._spans.append([clock(), parts, 0.0])

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._file.parent):
            content = self._settings | {"runs": []}
            if self._file.exists():
                content = json.loads(self._file.read_text())
                different = [name for name in COMMON if content.get(name) != self._settings[name]]
                if different:
                    raise CoverageError(f"{self._file} has runs with another {different[0]}: choose another --output")
            runs = content["runs"]
            # runs of earlier versions have no identifier
            index = next((i for i, run in enumerate(runs) if run.get("id") == self._run["id"]), len(runs))
            runs[index : index + 1] = [self._run]
            write_atomically(self._file, (json.dumps(content, indent=1) + "\n").encode())
        self._written_at = time.monotonic()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until no other process writes its results into a directory, and keep others waiting."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class AnonymousSampler(threading.Thread):
    """Samples anonymous memory; while native code holds the interpreter, it takes no samples."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._most, self._ended = 0, threading.Event()

    def run(self) -> None:
        while True:
            self._most = max(self._most, resident().anonymous)
            if self._ended.wait(SECONDS_BETWEEN_SAMPLES):
                return

    def stop(self) -> int:
        """End sampling and return the largest value in bytes."""
        self._ended.set()
        self.join()
        return self._most


def clock() -> float:
    """Seconds, once the card has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def reset_memory() -> bool:
    """Let the peaks of :func:`memory` start from now; whether that of host memory does, too."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        reset_peak()
    except OSError:
        # some containers do not have the right to
        return False
    return True


def memory() -> dict[str, int | None]:
    """Peaks of GPU and host memory in bytes; ``None`` without a GPU."""
    cuda = torch.cuda.is_available()
    return {
        "gpu_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "host_peak_bytes": resident().peak,
    }


def tree_bytes(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def environment() -> dict[str, Any]:
    """Card, driver, processor, host memory and versions."""
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "host_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return None
