"""Resident memory of a process, as counted by Linux."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

SECONDS_BETWEEN_SAMPLES = 0.01


class Resident(NamedTuple):
    """Bytes of a process in memory.

    Attributes:
        peak: largest value of ``total`` so far (``VmHWM``).
        total: all resident pages (``VmRSS``): anonymous, mapped and shared ones.
        anonymous: pages without a file, which the kernel cannot drop (``RssAnon``).
        mapped: pages of files, which the kernel drops when memory is short and reads again (``RssFile``).
    """

    peak: int
    total: int
    anonymous: int
    mapped: int


def resident(process: int | str = "self") -> Resident:
    """Read the current values.

    Raises:
        OSError: if the process has exited.
        KeyError: if the process is exiting.
    """
    lines = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(f"/proc/{process}/status").read_text()))
    return Resident(*(1024 * int(lines[name]) for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")))


def reset_peak() -> None:
    """Reset the peak of this process to its current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


class Sampler(threading.Thread):
    """Samples the memory of another process until it exits.

    A thread inside the measured process would be blocked by the global interpreter lock, for example in safetensors.

    Attributes:
        samples: times by ``time.monotonic``, whose clock all processes share, and memory at these times.
    """

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.process = process
        self.samples: list[tuple[float, Resident]] = []

    def run(self) -> None:
        while True:
            try:
                self.samples.append((time.monotonic(), resident(self.process)))
            except (OSError, KeyError):
                return
            time.sleep(SECONDS_BETWEEN_SAMPLES)

    def most(self, name: str, begin: float, end: float) -> int:
        """Return the largest sampled value of a field of :class:`Resident` between two times."""
        return max(getattr(seen, name) for moment, seen in self.samples if begin <= moment <= end)
