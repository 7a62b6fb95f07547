"""Keeps the sums of the gradient pass from time to time, so that a run that is killed goes on at a later batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from loguru import logger

from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.files.progress import Progress

# sums of ``obs`` are up to gigabytes, so they are not written more often
SECONDS = 240.0
SUMS, COUNTS = "sums", "batches"


class KeptSums:
    """The sums of all observers after a number of batches.

    Attributes:
        batches: how many batches are in the sums.
        idle: how many of them predicted no token.
    """

    def __init__(
        self,
        progress: Progress | None,
        observers: Sequence[LayerObserver],
        gradients: Sequence[GradientObserver],
        total: int,
    ):
        """Fill the sums of the observers with those that an equal run has kept.

        Args:
            progress: of the run; ``None``: nothing is kept.
            observers: without sums.
            gradients: without sums.
            total: number of batches of the pass.
        """
        self._progress, self._total = progress, total
        self._kinds: Mapping[str, Sequence[LayerObserver | GradientObserver]] = {
            "observed": observers,
            "gradients": gradients,
        }
        self.batches = self.idle = 0
        self._saved = time.monotonic()
        if progress is not None and (found := progress.load(SUMS)) is not None:
            self.batches, self.idle = found.pop(COUNTS).tolist()
            for name, tensor in found.items():
                kind, index, key = name.split(".")
                sums = self._kinds[kind][int(index)].sums
                sums[key] = tensor.to(sums[key].device) if key in sums else tensor
            begin = "with the sums" if self.batches == total else f"from batch {self.batches + 1}"
            logger.info(f"Going on {begin} of {total} batches")

    def add(self, batches: int, idle: int) -> None:
        """Count batches that are in the sums, and keep these if enough time has passed or if no batch is left.

        Args:
            batches: number of batches since the last call.
            idle: how many of them predicted no token.
        """
        self.batches += batches
        self.idle += idle
        if self._progress is None:
            return
        if self.batches == self._total or time.monotonic() - self._saved >= SECONDS:
            sums = {
                f"{kind}.{index}.{key}": tensor
                for kind, observers in self._kinds.items()
                for index, observer in enumerate(observers)
                for key, tensor in observer.sums.items()
            }
            self._progress.save(SUMS, sums | {COUNTS: torch.tensor([self.batches, self.idle])})
            self._saved = time.monotonic()
