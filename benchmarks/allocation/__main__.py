"""Compares ways to allocate an expert budget, on one model, one run and equal bytes.

Every row is a real run of the toolkit on a fresh copy of the model. Rows are appended to a file of JSON lines; rows
that it holds are not measured again, so a run that was stopped goes on where it was. ``--render`` writes the tables of
RESULTS.md from one or more such files.

    python -m benchmarks.allocation --results benchmarks/results/mini_moe.jsonl
    python -m benchmarks.allocation --render benchmarks/results/*.jsonl
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
        share=args.share,
    )


def parse_share(argument: str) -> tuple[int, int]:
    """Part, from 0 on, and number of parts of ``I/N``."""
    number, _, shares = argument.partition("/")
    if not (number.isdigit() and shares.isdigit() and 1 <= int(number) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{argument!r} is no share such as 2/8")
    return int(number) - 1, int(shares)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allocation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = {"type": Source.parse, "nargs": "+", "metavar": "NAME=FILE[@SKIP]"}
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--model", default=str(MINI_MOE), metavar="[NAME=]DIR")
    parser.add_argument("--calibration", **source, help="texts, without SKIP leading characters; calibration.txt")
    parser.add_argument("--evaluation", **source, help="texts that the loss is measured on; heldout.txt")
    parser.add_argument("--calibration-windows", type=int, default=96, help="drawn for every run")
    parser.add_argument("--windows", type=int, default=112, help="measured of every evaluation text, the first ones")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--repetitions", type=int, default=3, help="seeds, each with calibration windows of its own")
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    parser.add_argument("--tables", default="", help="measure only tables whose key this regular expression finds")
    parser.add_argument(
        "--share",
        type=parse_share,
        default=(0, 1),
        metavar="I/N",
        help="measure the I-th of N parts of the missing rows",
    )
    parser.add_argument("--results", type=Path, default=Path("out/allocation.jsonl"))
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="measure nothing, write RESULTS.md")
    return parser


if __name__ == "__main__":
    main()
