"""The progress bar of a ``oneshot`` run: one for the passes of all modifiers of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from llmcompressor.entrypoints.oneshot import Oneshot

from moe_coverage_plugin.calibration.job_bar import JobBar, in_job
from moe_coverage_plugin.modifiers.oneshot_run import recipe_of, running_oneshot

_bars: WeakKeyDictionary[Oneshot, JobBar] = WeakKeyDictionary()


@contextmanager
def run_bar(batches: int) -> Iterator[None]:
    """Let passes take part in the bar of the run, which the first of them creates.

    Modifiers have a method ``passes``, from the number of batches to the costs of their passes by title, in forward
    passes over the calibration set. Those of llm-compressor have bars of their own.

    Args:
        batches: of the calibration set.
    """
    run = running_oneshot()
    if run is not None and run not in _bars:
        costs: dict[str, float] = {}
        for modifier in recipe_of(run):
            passes: Callable[[int], dict[str, float]] | None = getattr(modifier, "passes", None)
            costs |= passes(batches) if passes is not None else {}
        _bars[run] = JobBar(costs)
    with in_job(_bars[run] if run is not None else None):
        yield


def close_bar(run: Oneshot) -> None:
    """End the bar of a run, which stays open if the run stops."""
    if run in _bars:
        _bars.pop(run).close()
