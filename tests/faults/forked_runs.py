"""A program that runs ``oneshot`` in a fork of its process and kills it.

Its argument is an order, and the last line that it prints is the result, both in JSON. The run reports when it enters
a phase and waits for a byte to go on, so that times are counted from the phase's beginning.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import tqdm
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier
from moe_coverage_plugin.checkpoint import saving
from tests.checkpoint.runs import W4
from tests.tiny import token_batches

SCORES = "kept.safetensors"
OUTPUT = "out"


def phases(report: Callable[[str], None]) -> None:
    """Make a run report when it begins ``scoring``, ``planning``, ``quantizing`` and ``saving``."""
    for owner, method, phase in (
        (AttributionModifier, "on_calibration_start", "scoring"),
        (CoverageModifier, "on_calibration_end", "planning"),
        (QuantizationModifier, "on_calibration_start", "quantizing"),
        (saving, "staged", "saving"),
    ):
        setattr(owner, method, _reporting(getattr(owner, method), phase, report))


def _reporting(call: Callable[..., Any], phase: str, report: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(call)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        report(phase)
        return call(*args, **kwargs)

    return reporting


def run(source: str, directory: Path, sharded: bool) -> None:
    """Score, prune, quantize to 4 bits and save, in one file as ``oneshot`` does or in many; keep the scores."""
    recipe = [
        AttributionModifier(save_scores=str(directory / SCORES)),
        CoverageModifier(sparsity=0.4),
        AlignmentModifier(block_size=32),
        ChannelPruningModifier(reconstruct=False, pictures=False),
        QuantizationModifier(**W4),
    ]
    output = str(directory / OUTPUT)
    model = oneshot(
        model=source,
        dataset=token_batches(samples=4, length=16),
        recipe=recipe,
        output_dir=None if sharded else output,
        shuffle_calibration_samples=False,
    )
    if sharded:
        model.save_pretrained(output, max_shard_size="60KB")


def fork(source: str, directory: Path, sharded: bool) -> tuple[int, int, int]:
    """Start a run; return its process, the pipe of its phases, and the pipe that it waits on after each phase."""
    reports, report_end = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if child:
        os.close(report_end)
        os.close(wait)
        return child, reports, go
    status = 1
    try:
        os.close(reports)
        os.close(go)

        def report(phase: str) -> None:
            os.write(report_end, f"{phase}\n".encode())
            os.read(wait, 1)

        phases(report)
        report("opening")
        run(source, directory, sharded)
        report("done")
        status = 0
    finally:
        os._exit(status)


def observed(order: dict[str, Any]) -> dict[str, Any]:
    """Make a run, killed in the phase in the order's ``kill``, the given seconds after it began.

    Without seconds, the run is killed when the phase begins. A run that is done earlier is killed before its process
    ends. The result says how it ended and how long each phase took.
    """
    child, pipe, go = fork(order["source"], Path(order["directory"]), order["sharded"])
    phase, after = order.get("kill") or (None, None)
    seen: list[tuple[str, float]] = []
    deadline = None
    with os.fdopen(pipe, "rb", buffering=0) as reports:
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready, _, _ = select.select([reports], [], [], left)
            if not ready:
                break
            if not (line := reports.readline()):
                break
            seen.append((line.decode().strip(), time.monotonic()))
            if seen[-1][0] == phase and after is not None:
                deadline = time.monotonic() + after
            elif phase is not None and seen[-1][0] in (phase, "done"):
                break  # the run waits for a byte that is not sent
            os.write(go, b".")
        if phase is not None:
            os.kill(child, signal.SIGKILL)
        ended = time.monotonic()
    os.close(go)
    _, status = os.waitpid(child, 0)
    times = [moment for _, moment in seen] + [ended]
    return {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "succeeded": os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0,
        "phase": seen[-1][0],
        "seconds": {name: times[i + 1] - times[i] for i, (name, _) in enumerate(seen)},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # its thread would not survive a fork
    print(json.dumps(observed(json.loads(sys.argv[1]))))
