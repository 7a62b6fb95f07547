"""One progress bar, with the time left, for all passes of a run.

Passes differ in what a step costs, so the bar counts work in forward passes over the calibration set, and each pass
takes its share of it. Outside of a run, a pass has a bar of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from compressed_tensors.distributed import is_source_process
from tqdm import tqdm

T = TypeVar("T")

FORMAT = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"


class JobBar:
    """The bar of a run."""

    def __init__(self, costs: Mapping[str, float]):
        """Show the bar.

        Args:
            costs: the passes of the run by title, in their order, each in forward passes over the calibration set.
        """
        self._costs, self._done = costs, 0.0
        self._bar = tqdm(total=sum(costs.values()), bar_format=FORMAT, disable=not is_source_process())

    def counts(self, title: str) -> bool:
        """Whether a pass is part of the bar."""
        return title in self._costs

    def steps(self, values: Iterable[T], title: str, total: int, initial: int) -> Iterator[T]:
        """Iterate over the steps of a pass (see :func:`with_progress`)."""
        titles = list(self._costs)
        position = titles.index(title)
        start, step = sum(self._costs[each] for each in titles[:position]), self._costs[title] / max(total, 1)
        then = f", then {', '.join(titles[position + 1 :])}".lower() if titles[position + 1 :] else ""
        self._skip_to(start + initial * step)
        for index, value in enumerate(values, start=initial):
            self._bar.set_description(f"{title} {index}/{total}{then}", refresh=False)
            yield value
            self._bar.update(start + (index + 1) * step - self._done)
            self._done = start + (index + 1) * step
        self._skip_to(start + self._costs[title])
        if not then:
            self.close()

    def close(self) -> None:
        """End the bar, also if passes have not run."""
        self._bar.close()

    def _skip_to(self, done: float) -> None:
        # the bars of other ranks are not shown, and have no place to begin
        if not self._bar.disable:
            # what an interrupted run has done takes no time now, which must not look like a high speed
            self._bar.initial += done - self._done
            self._bar.n = done
        self._done = done


_job: ContextVar[JobBar | None] = ContextVar("job", default=None)


@contextmanager
def in_job(bar: JobBar | None) -> Iterator[None]:
    """Let passes take part in the bar of a run; ``None``: each has its own."""
    token = _job.set(bar)
    try:
        yield
    finally:
        _job.reset(token)


def with_progress(values: Iterable[T], title: str, total: int, initial: int = 0, unit: str = "it") -> Iterable[T]:
    """Iterate over the steps of a pass and show the progress.

    Args:
        values: the steps to do.
        title: of the pass.
        total: number of its steps.
        initial: steps that are done already.
        unit: what a step is.
    """
    job = _job.get()
    if job is not None and job.counts(title):
        return job.steps(values, title, total, initial)
    return tqdm(values, desc=title, total=total, initial=initial, unit=unit)
