"""Serves a mixed load for minutes on ragged and stock checkpoints, and follows memory and answers.

The load has greedy and sampled requests, several answers to one prompt, log-probabilities of prompts, prompts nearly
as long as the engine takes, common beginnings of prompts, and requests that are aborted. Measured are the memory of
the card and of the host after the warm-up, and how answers differ from those of single requests. By default, the
checkpoints are those of ``benchmarks.serving``, with random weights. Writes all figures with the card and versions;
the file is written again after every checkpoint. Exits with status 1 if one failed, if the memory of its card grew, or
if an answer differs too much.

    python -m benchmarks.soak --output benchmarks/results/soak.json
    python -m benchmarks.soak --devices 0 1 --output benchmarks/results/soak.json
    python -m benchmarks.soak --checkpoints ours=out/demo/p_q4 stock=out/demo/q4 --output out/soak.json
    python -m benchmarks.soak --render benchmarks/results/soak.json
    VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.soak --small --enforce-eager --minutes 0.2 --output /tmp/soak.json
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.commands import portable
from benchmarks.serving.__main__ import add_engine_options, chosen_shape, measure_in_process
from benchmarks.serving.checkpoints import VARIANTS, write_checkpoint
from benchmarks.soak.figures import failures
from benchmarks.soak.render import line
from moe_coverage_plugin.manifest import Manifest

DEFAULT_VARIANTS = ("stock4", "ours4")
TOLERANCE = 0.1
GROWTH = 2**26
COMPARED, COMPARED_SMALL = 64, 8
MAX_MODEL_LEN, MAX_MODEL_LEN_SMALL = 4096, 128


def main() -> None:
    args = _parser().parse_args()
    if args.render:
        # imported here because environments with vLLM need not have tabulate
        from benchmarks.markers import RESULTS
        from benchmarks.soak.render import write_results

        write_results(args.render, RESULTS)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Serve all checkpoints, one after another or each on its own card, and exit with status 1 if one failed."""
    shape = chosen_shape(args)
    options = {
        name: getattr(args, name)
        for name in (
            *("at_once", "tensor_parallel_size", "enable_expert_parallel", "gpu_memory_utilization"),
            *("enforce_eager", "minutes", "seed"),
        )
    }
    request: dict[str, Any] = options | {
        "warm_up_minutes": args.minutes / 5 if args.warm_up_minutes is None else args.warm_up_minutes,
        "compared": COMPARED_SMALL if args.small else COMPARED,
        "max_model_len": args.max_model_len or (MAX_MODEL_LEN_SMALL if args.small else MAX_MODEL_LEN),
    }
    record: dict[str, Any] = {
        "command": portable("benchmarks.soak", sys.argv[1:], {"--output", "--logs", "--devices"}),
        "seed": args.seed,
        "environment": None,
        "shape": None if args.checkpoints else shape,
        "request": request,
        "limits": {"tolerance": args.tolerance, "growth": GROWTH},
        "checkpoints": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        own: dict[str, dict[str, Any]] = {}
        for name, path in args.checkpoints or []:
            link = Path(temporary, name)
            link.symlink_to(path.resolve())
            own[name] = {"checkpoint": str(link), "ragged": _is_ragged(path), "random_weights": False}
        for name in [] if args.checkpoints else args.variants:
            write_checkpoint(Path(temporary, name), shape, VARIANTS[name], args.seed)
            own[name] = {
                "checkpoint": str(Path(temporary, name)),
                "ragged": VARIANTS[name].pruned,
                "random_weights": True,
            }
        for name, result in _results({name: request | fields for name, fields in own.items()}, logs, args.devices):
            record["environment"] = record["environment"] or result["environment"]
            figures = result["figures"]
            if "error" not in figures:
                figures["failures"] = failures(figures, args.tolerance, GROWTH)
            record["checkpoints"][name] = figures
            # in the order of the arguments, whichever ended first
            record["checkpoints"] = {
                each: record["checkpoints"][each] for each in own if each in record["checkpoints"]
            }
            args.output.write_text(json.dumps(record) + "\n")
            print(f"{name}: {line(figures)}", flush=True)
    if any("error" in figures or figures["failures"] for figures in record["checkpoints"].values()):
        sys.exit(1)


def _results(
    requests: dict[str, dict[str, Any]], logs: Path, devices: list[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and result of each checkpoint as soon as it ends."""
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for device in devices or [None]:
        free.put(device)

    def run(name: str) -> dict[str, Any]:
        device = free.get()
        variables = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        try:
            return measure_in_process(requests[name], logs / f"{name}.log", "benchmarks.soak.engine", **variables)
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(devices or [None])) as pool:
        names = {pool.submit(run, name): name for name in requests}
        for done in as_completed(names):
            yield names[done], done.result()


def _is_ragged(checkpoint: Path) -> bool:
    manifest = Manifest.from_checkpoint(checkpoint)
    return manifest is not None and manifest.layout == "ragged"


def _checkpoint(argument: str) -> tuple[str, Path]:
    name, separator, path = argument.partition("=")
    if not separator or not Path(path, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{argument}: must be NAME=DIR, and DIR must have a config.json")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=Path, help="JSON file to write")
    task.add_argument(
        "--render", type=Path, nargs="+", metavar="FILE", help="write RESULTS.md from these files and measure nothing"
    )
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS)
    served.add_argument(
        "--checkpoints", nargs="+", type=_checkpoint, metavar="NAME=DIR", help="serve these instead of random weights"
    )
    parser.add_argument("--minutes", type=float, default=30, help="time of the load")
    parser.add_argument("--warm-up-minutes", type=float, help="memory is followed from then on; by default a fifth")
    parser.add_argument("--at-once", type=int, default=64, help="requests that the engine has at any moment")
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="GPU",
        help="serve the checkpoints at the same time, each on one of these cards",
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="bound of an answer's median difference")
    add_engine_options(parser)
    parser.add_argument("--max-model-len", type=int, help=f"by default {MAX_MODEL_LEN}")
    parser.add_argument("--seed", type=int, default=0, help="seed of widths, weights and requests")
    parser.add_argument("--small", action="store_true", help="use a tiny shape and few answers, for a trial")
    return parser


if __name__ == "__main__":
    main()
