"""Measures end-to-end speed and memory of ragged checkpoints in vLLM, compared with stock checkpoints.

The model has the shape of Qwen3-30B-A3B and random weights. Each variant runs in its own engine: stock4 is unpruned,
in W4A16 with groups of 128, except head and routers; ours4 is the same with a quarter of the expert channels removed,
random widths in blocks of 128; stock8 and ours8 are in FP8_DYNAMIC, stock16 and ours16 in bfloat16. Measured are
memory of weights, decoded tokens per second of 1, 64 and 256 sequences, seconds of a prefill of 2048 tokens, and
seconds to start. Prints ratios, and writes all figures with the card and versions; the file is written again after
every variant.

    python -m benchmarks.serving --output benchmarks/results/serving.json
    python -m benchmarks.serving --tensor-parallel-size 2 --output benchmarks/results/serving_tp2.json
    python -m benchmarks.serving --tensor-parallel-size 2 --enable-expert-parallel --output out/serving_ep2.json
    python -m benchmarks.serving --render benchmarks/results/serving*.json
    VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.serving --small --enforce-eager --output /tmp/serving.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import portable
from benchmarks.serving.checkpoints import FULL, SMALL, VARIANTS, write_checkpoint
from benchmarks.serving.ratios import ratios, table

DEFAULT_VARIANTS = ("stock4", "ours4", "stock16")
TAIL_LINES = 40


@dataclass(frozen=True)
class Work:
    """Work that every variant does; see ``variant.Request``."""

    batches: tuple[int, ...] = (1, 64, 256)
    prompt: int = 128
    new: int = 128
    prefill: int = 2048
    max_model_len: int = 4096


SMALL_WORK = Work(batches=(1, 4), prompt=16, new=8, prefill=64, max_model_len=128)


def main() -> None:
    args = _parser().parse_args()
    if args.render:
        # imported here because environments with vLLM need not have tabulate
        from benchmarks.markers import RESULTS
        from benchmarks.serving.render import write_results

        write_results(args.render, RESULTS)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measure the variants one after the other, and exit with status 1 if one failed."""
    shape = chosen_shape(args)
    options = {
        name: getattr(args, name)
        for name in (
            *("tensor_parallel_size", "enable_expert_parallel", "gpu_memory_utilization", "enforce_eager"),
            "seed",
        )
    }
    request = asdict(SMALL_WORK if args.small else Work()) | options
    record: dict[str, Any] = {
        "command": portable("benchmarks.serving", sys.argv[1:], {"--output", "--logs"}),
        "seed": args.seed,
        "environment": None,
        "shape": shape,
        "request": request,
        "variants": {},
        "ratios": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for name in args.variants:
            print(f"{name} ...", file=sys.stderr, flush=True)
            checkpoint, variant = Path(temporary, name), VARIANTS[name]
            write_checkpoint(checkpoint, shape, variant, args.seed)
            own = request | {"checkpoint": str(checkpoint), "ragged": variant.pruned}
            result = measure_in_process(own, logs / f"{name}.log")
            record["environment"] = record["environment"] or result["environment"]
            record["variants"][name] = result["figures"]
            record["ratios"] = ratios(record["variants"])
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['environment']}, {shape['num_hidden_layers']} layers, seed {args.seed}\n")
    print(table(record["variants"]))
    if any("error" in figures for figures in record["variants"].values()):
        sys.exit(1)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add options that all benchmarks have which serve these variants."""
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="number of cards per model")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="each of these cards has entire experts")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--logs", type=Path, help="directory for the output of engines, which is not kept by default")
    parser.add_argument("--enforce-eager", action="store_true", help="use no graphs, for a machine without a card")


def chosen_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shape of the variants by ``--small`` and ``--layers``."""
    shape = dict(SMALL if args.small else FULL)
    if args.layers:
        shape["num_hidden_layers"] = args.layers
    return shape


def measure_in_process(
    request: dict[str, Any], log: Path, module: str = "benchmarks.serving.variant", **variables: str
) -> dict[str, Any]:
    """Measure one checkpoint in its own process, whose output is written to ``log``.

    Args:
        request: fields of the module's request, with ``checkpoint``, beside which files are written.
        log: file to write.
        module: module to run, which takes the files of request and result.
        variables: environment variables of the process, besides those of this one.

    Returns:
        ``environment`` and ``figures``. If the process failed, the figures are ``{"error": message}``, and the end of
        its output is printed.
    """
    checkpoint = Path(request["checkpoint"])
    request_file, result_file = checkpoint.with_suffix(".request.json"), checkpoint.with_suffix(".result.json")
    request_file.write_text(json.dumps(request))
    # vLLM needs this to send functions to the engine's process
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | variables
    command = [sys.executable, "-m", module, str(request_file), str(result_file)]
    with log.open("w") as file:
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    # written last, so it is complete even if the engine then fails to stop
    if result_file.exists():
        return json.loads(result_file.read_text())
    text = log.read_text()
    print(*text.splitlines()[-TAIL_LINES:], sep="\n", file=sys.stderr)
    return {"environment": None, "figures": {"error": last_error(text) or f"exit status {done.returncode}"}}


def last_error(log: str) -> str | None:
    """Return the last error of a log, without vLLM's report that the engine's process failed."""
    errors = re.findall(r"\b([A-Z]\w*(?:Error|Exception): .+)", log)
    return next((message for message in reversed(errors) if "root cause above" not in message), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=Path, help="JSON file to write")
    task.add_argument(
        "--render", type=Path, nargs="+", metavar="FILE", help="write RESULTS.md from these files and measure nothing"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS)
    add_engine_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of widths, weights and prompts")
    parser.add_argument("--small", action="store_true", help="use a tiny shape and little work, for a trial")
    return parser


if __name__ == "__main__":
    main()
