"""A program that runs ``oneshot`` and kills itself at a given moment.

Its argument is an order in JSON. A run that is not killed prints, as its last line, how often it did each kind of work
and the messages that it logged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import tqdm
from compressed_tensors.offload.module import offload_module, remove_module_offload
from llmcompressor import oneshot
from loguru import logger

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageModifier,
    LayerwiseGPTQModifier,
)
from moe_coverage_plugin.calibration import interactions, kept_sums, observation
from moe_coverage_plugin.files import progress
from moe_coverage_plugin.modifiers import reconstruction_pass, resumption
from tests.modifiers.harness import open_linear
from tests.tiny import four_bits, token_batches

BLOCK = 16
# what is counted, and when a run can be killed: before the next of it
WORK = {
    "batch": (observation, "_backward"),
    "score": (interactions, "_scores_of"),
    "fit": (reconstruction_pass._Reconstruction, "_change"),
    "quantize": (LayerwiseGPTQModifier, "quantize_others"),
    "write": (progress, "save_file"),
}


def recipe(order: dict[str, Any]) -> list[Any]:
    """Modifiers of an order."""
    quantizer = LayerwiseGPTQModifier(**four_bits(BLOCK))
    if order.get("only_quantizes"):
        return [quantizer]
    found: list[Any] = [
        AttributionModifier(ignore=order.get("ignore", [])),
        CoverageModifier(sparsity=order.get("sparsity", 0.5)),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(pictures=False, **order.get("pruning", {})),
    ]
    return found + [quantizer] * order.get("quantizes", True)


def count(kill: tuple[str, int] | None, unwritten: int | None) -> Counter[str]:
    """Count each kind of work, and kill this process before a given one.

    Args:
        kill: the kind and the number of that work; what a thread writes at that moment is written first.
        unwritten: number of a file that is never complete, so that the process is killed while a thread writes it.
    """
    done: Counter[str] = Counter()

    def counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def work(*args: Any, **kwargs: Any) -> Any:
            if kind == "write" and done[kind] == unwritten:
                Path(args[1]).write_bytes(b"half of a file")
                threading.Event().wait()
            if kill is not None and [kind, done[kind]] == list(kill):
                if kind == "write":
                    Path(args[1]).write_bytes(b"half of a file")
                elif unwritten is None:
                    for running in list(resumption._progress.values()):
                        running.finish()
                os.kill(os.getpid(), signal.SIGKILL)
            done[kind] += 1
            return call(*args, **kwargs)

        return work

    for kind, (owner, name) in WORK.items():
        setattr(owner, name, counted(kind, getattr(owner, name)))
    return done


def run(order: dict[str, Any]) -> None:
    """One run, as the order says."""
    model: Any = order["model"]
    if order.get("bfloat16") or order.get("offload"):
        model = open_linear(Path(order["model"]))
        model = model.bfloat16() if order.get("bfloat16") else model
    if order.get("offload"):
        for module in model.modules():
            remove_module_offload(module)
            offload_module(module, "cpu", "cpu")
    oneshot(
        model=model,
        tokenizer=order["model"],
        dataset=token_batches(samples=order.get("samples", 24), length=48),
        batch_size=8,
        recipe=recipe(order),
        output_dir=order["output"],
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=False,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.seed()  # forks would have the same one
    tqdm.tqdm.monitor_interval = 0
    given = json.loads(sys.argv[1])
    kept_sums.SECONDS = 0.0
    messages: list[str] = []

    def log(message: Any) -> None:
        messages.append(message.record["message"])
        print(messages[-1], file=sys.stderr, flush=True)

    logger.add(log, level="INFO")
    work = count(given.get("kill"), given.get("unwritten"))
    run(given)
    print(json.dumps({"work": work, "messages": messages}))
