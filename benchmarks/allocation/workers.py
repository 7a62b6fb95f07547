"""Measures rows by several processes, each with a model of its own, on all visible cards in turn.

The kernels of a small model leave most of a card idle while its process prepares the next one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from benchmarks.allocation.bench import Bench, score_path
from benchmarks.allocation.jobs import Job, measured_row
from benchmarks.allocation.rows import Row

# what a process measures with
_benches: list[Bench] = []


def measured_by(workers: int, jobs: Sequence[Job], opened: Callable[[], Bench], scores: Path) -> Iterator[Row]:
    """Yield rows as they are measured. Scores that several of them need are measured once, before them.

    Args:
        workers: number of processes.
        jobs: rows to measure.
        opened: opens the model, in each process.
        scores: directory of score files, which all processes use.
    """
    context = multiprocessing.get_context("spawn")
    cards = context.SimpleQueue()
    for card in _cards(workers):
        cards.put(card)
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, _open, (opened, cards, threads)) as pool:
        try:
            yield from _measured(pool, jobs, scores)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _measured(pool: ProcessPoolExecutor, jobs: Sequence[Job], scores: Path) -> Iterator[Row]:
    waiting: dict[Path | None, list[Job]] = defaultdict(list)
    for job in jobs:
        waiting[score_path(scores, job.setting, job.calibration)].append(job)
    # files are written atomically: those that exist are complete
    unscored = [path for path in waiting if path is not None and not path.exists()]
    tasks: dict[Future[Any], Path | None] = {pool.submit(_score, waiting[path][0]): path for path in unscored}
    tasks |= {pool.submit(_measure, job): path for path in waiting if path not in unscored for job in waiting[path]}
    seconds: dict[Path | None, float] = {}
    while tasks:
        done, _ = wait(tasks, return_when=FIRST_COMPLETED)
        for future in done:
            path = tasks.pop(future)
            if path in unscored:
                unscored.remove(path)
                # the rows meet an error of their scores again, and one of this package is stored in them
                seconds[path] = 0.0 if future.exception() else future.result()
                tasks |= {pool.submit(_measure, job): path for job in waiting[path]}
            else:
                yield replace(future.result(), scoring_seconds=seconds.get(path, 0.0))


def _cards(workers: int) -> list[str]:
    """The card of each process, as ``CUDA_VISIBLE_DEVICES`` names it."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    return [cards[number % len(cards)] for number in range(workers)]


def _open(opened: Callable[[], Bench], cards: SimpleQueue[str], threads: int) -> None:
    # before the first call of CUDA in this process
    os.environ["CUDA_VISIBLE_DEVICES"] = cards.get()
    torch.set_num_threads(threads)
    _benches.append(opened())


def _score(job: Job) -> float:
    """Measure the scores that a row needs, and return the seconds."""
    path = _benches[0].score_file(job.setting, job.calibration)
    assert path is not None
    return _benches[0].scoring_seconds[path]


def _measure(job: Job) -> Row:
    return measured_row(_benches[0], job)
