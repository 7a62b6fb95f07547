"""Compares methods that allocate channels to experts, on one model at equal bytes.

Every row is one run of the toolkit on a fresh copy of the model. Rows are appended to a file of JSON lines. Rows that
are already in the file are not measured again, so an interrupted comparison can be continued. ``--render`` writes the
tables of RESULTS.md from one or more such files. 24 workers on two NVIDIA H200 measured two rows of the model of 85 M
parameters per second, without reconstruction. Workers hinder each other on a card, unless NVIDIA's Multi-Process
Service runs there: rows of REAP then took 20 instead of 200 s, beside 13 other workers on one H200.
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` leaves more of the memory to the others.

    python -m benchmarks.allocation --results out/mini_moe.jsonl
    python -m benchmarks.allocation --render benchmarks/results/recommended_mini_moe.jsonl out/mini_moe.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from loguru import logger

from benchmarks.allocation import runs
from benchmarks.allocation.render import write_results
from benchmarks.allocation.text import Source
from benchmarks.markers import RESULTS
from moe_coverage_plugin.manifest import CoverageError

MINI_MOE = Path(__file__).parents[1] / "testbed" / "mini_moe"


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    try:
        if args.render:
            write_results(args.render, RESULTS)
        else:
            runs.run(_plan(args), args.device, args.results)
    except CoverageError as error:
        parser.error(str(error))


def _plan(args: argparse.Namespace) -> runs.Plan:
    name, _, path = args.model.rpartition("=")
    model = Path(path)
    return runs.Plan(
        name=name or model.resolve().name,
        model=model,
        calibration=args.calibration or [Source("calibration", model / "calibration.txt")],
        evaluation=args.evaluation or [Source("heldout", model / "heldout.txt")],
        calibration_windows=args.calibration_windows,
        windows=args.windows,
        seeds=range(args.seed, args.seed + args.repetitions),
        dtype=args.dtype,
        tables=args.tables,
        own=args.own,
        workers=args.workers,
        scores=args.scores,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allocation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = {"type": Source.parse, "nargs": "+", "metavar": "NAME=FILE[@SKIP]"}
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--model", default=str(MINI_MOE), metavar="[NAME=]DIR")
    parser.add_argument(
        "--calibration",
        **source,
        help="texts to calibrate on, without their first SKIP characters (default: calibration.txt of the model)",
    )
    parser.add_argument(
        "--evaluation", **source, help="texts to measure the loss on (default: heldout.txt of the model)"
    )
    parser.add_argument(
        "--own",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text that the model wrote itself, by moe-coverage sample, one file for each seed",
    )
    parser.add_argument("--calibration-windows", type=int, default=96, help="windows that each run calibrates on")
    parser.add_argument("--windows", type=int, default=112, help="windows of each evaluation text, from the first")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="number of seeds; each draws its own calibration windows"
    )
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype to compute in")
    parser.add_argument("--tables", default="", help="measure only tables whose keys match this regular expression")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that measure, each with a model of its own, on all visible cards in turn",
    )
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="DIR",
        help="keep the measured scores there, and take those that are there (default: a temporary directory)",
    )
    parser.add_argument("--results", type=Path, default=Path("out/allocation.jsonl"))
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="FILE", help="write RESULTS.md from these files and measure nothing"
    )
    return parser


if __name__ == "__main__":
    main()
