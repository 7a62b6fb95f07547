"""Resident memory of a process as Linux counts it."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

SECONDS_BETWEEN_SAMPLES = 0.01


class Resident(NamedTuple):
    """Bytes in memory at one moment.

    Attributes:
        peak: the most that ``total`` has been, which the kernel remembers (``VmHWM``).
        total: all pages of the process that are in memory (``VmRSS``): the two that follow, and shared ones.
        anonymous: pages that only this process has, which nothing can take away (``RssAnon``).
        mapped: pages of files, which the kernel drops when memory is short and reads again (``RssFile``).
    """

    peak: int
    total: int
    anonymous: int
    mapped: int


def resident(process: int | str = "self") -> Resident:
    """Now; raises ``OSError`` or ``KeyError`` for a process that is gone or going."""
    lines = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(f"/proc/{process}/status").read_text()))
    return Resident(*(1024 * int(lines[name]) for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")))


def forget_peak() -> None:
    """Make the kernel count this process's peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


class Sampler(threading.Thread):
    """Looks at another process until it ends. A thread inside it would be kept waiting, by safetensors for instance.

    Attributes:
        samples: moments on the clock ``time.monotonic``, which all processes share, and what was resident then.
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
        """The largest value of a field of :class:`Resident` seen in a span of time."""
        return max(getattr(seen, name) for moment, seen in self.samples if begin <= moment <= end)
