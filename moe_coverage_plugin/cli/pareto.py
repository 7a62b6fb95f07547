"""``moe-coverage pareto``: loss against size of measured checkpoints, drawn."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from moe_coverage_plugin.report.pareto import read_results, write_pareto


def run(arguments: Namespace) -> None:
    """Draw the results of a file.

    Raises:
        CoverageError: the results cannot be read, or the picture cannot be written.
    """
    write_pareto(read_results(Path(arguments.results)), Path(arguments.output))
    print(f"Wrote {arguments.output}")
