"""Common options of benchmarks whose runs are records in a JSON file, and rendering of the records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.allocation.text import Source
from benchmarks.markers import RESULTS, markers, write_between
from moe_coverage_plugin.files.atomic import write_atomically

MINI_MOE = Path(__file__).with_name("testbed") / "mini_moe"
Record = dict[str, Any]


def run_parser(
    module: str, description: str | None, texts: str, result: Path, dtype_help: str
) -> argparse.ArgumentParser:
    """Options of a model, texts, windows, machine and files; the mini-MoE of this repository by default.

    Args:
        module: module for ``python -m``.
        description: description in the help.
        texts: option for the texts to calibrate on.
        result: JSON file to add runs to.
        dtype_help: help of ``--dtype``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = {"type": Source.parse, "nargs": "+", "metavar": "NAME=FILE[@SKIP]"}
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--model", type=_model, default=("mini_moe", MINI_MOE), metavar="[NAME=]DIR")
    parser.add_argument(texts, **source, default=[Source("calibration", MINI_MOE / "calibration.txt")])
    parser.add_argument("--evaluation", **source, default=[Source("heldout", MINI_MOE / "heldout.txt")])
    parser.add_argument("--windows", type=int, default=112, help="windows of each evaluation text, from the first")
    parser.add_argument("--calibration-windows", type=int, default=96, help=f"windows drawn from the texts of {texts}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32" if accelerator is None else "bfloat16",
        help=f"{dtype_help}; many CPUs compute in float32 only",
    )
    parser.add_argument("--directory", type=Path, help="directory for checkpoints, which are deleted at the end")
    parser.add_argument("--output", type=Path, default=result, help="JSON file to add the run to")
    parser.add_argument("--render", action="store_true", help="measure nothing, write RESULTS.md")
    return parser


def measure_or_render(
    args: argparse.Namespace,
    name: str,
    title: str,
    measure: Callable[[argparse.Namespace], Record],
    section: Callable[[Record], str],
) -> None:
    """Add a run to ``args.output`` and print it, or write all runs into RESULTS.md.

    Args:
        args: parsed by :func:`run_parser`.
        name: name of the benchmark's module and of its markers.
        title: title of the section, if it does not exist yet.
        measure: runs the benchmark.
        section: renders a record as Markdown.
    """
    file: Path = args.output
    if args.render:
        begin, end = markers(name)
        introduction = f"## {title}\n\nWritten by `python -m benchmarks.{name} --render`.\n\n{begin}\n{end}\n"
        write_between(RESULTS, name, introduction, "\n\n".join(map(section, json.loads(file.read_text()))))
        return
    record = measure(args)
    records = json.loads(file.read_text()) if file.exists() else []
    write_atomically(file, (json.dumps([*records, record], indent=1) + "\n").encode())
    print(section(record))


def _model(argument: str) -> tuple[str, Path]:
    name, separator, path = argument.rpartition("=")
    return name if separator else Path(path).name, Path(path)
