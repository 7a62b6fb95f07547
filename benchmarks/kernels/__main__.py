"""Times our layer with experts of unequal width, and vLLM's fused MoE with experts of one width and equal total width.

Needs a GPU and vLLM. Each measured row is appended to a file of JSON lines. ``--render`` writes the tables of
RESULTS.md from such files; of several rows for the same setting, the last one is used.

    python -m benchmarks.kernels --results benchmarks/results/kernels.jsonl
    python -m benchmarks.kernels --render benchmarks/results/kernels.jsonl
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.kernels.shapes import SHAPES, TOKENS
from moe_coverage_plugin.manifest import CoverageError


def main() -> None:
    """Measure, or render what was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="", metavar="REGEX", help="measure only shapes whose names match")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--bits", type=int, nargs="+", choices=(4, 8, 16), default=(4, 8, 16))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("out/kernels.jsonl"))
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="FILE", help="write RESULTS.md from these files and measure nothing"
    )
    args = parser.parse_args()
    try:
        if args.render:
            # imported here because environments with vLLM need not have tabulate
            from benchmarks.kernels.render import write_results
            from benchmarks.markers import RESULTS

            write_results(args.render, RESULTS)
            return
        from benchmarks.kernels.runs import run

        shapes = [shape for shape in SHAPES if re.search(args.shapes, shape.name)]
        if not shapes:
            names = ", ".join(shape.name for shape in SHAPES)
            raise CoverageError(f"--shapes {args.shapes!r} matches none of {names}: use a part of one of these names")
        run(shapes, args.tokens, args.bits, args.seed, args.results)
    except CoverageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
