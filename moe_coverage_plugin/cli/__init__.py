"""The console script ``moe-coverage``: compress, see what a plan would do, what a checkpoint holds, and what it costs.

Everything heavy is imported by the subcommand that needs it. Only those that compress need the toolkit, so that the
others run in a serving environment too.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from moe_coverage_plugin.cli.arguments import build_parser
from moe_coverage_plugin.manifest import CoverageError

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 2, with one line on stderr, for what the user can put right."""
    commands = {"oneshot": _oneshot, "finetune": _finetune, "plan": _plan, "inspect": _inspect, "eval": _eval}
    parser = build_parser(commands | {"pareto": _pareto})
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # who read the output, such as head, has seen enough; what is left must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CoverageError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == __name__.partition(".")[0]:
            raise
        return _refuse(f'{package} is not installed here: pip install "moe-coverage-plugin[compress]"')
    return 0


def _refuse(message: str) -> int:
    # names out of a damaged file may hold anything
    print("moe-coverage:", " ".join(message.split()), file=sys.stderr)
    return USER_ERROR


def _oneshot(arguments: Namespace) -> None:
    from moe_coverage_plugin.cli.oneshot import run

    run(arguments)


def _finetune(arguments: Namespace) -> None:
    from moe_coverage_plugin.cli.finetune import run

    run(arguments)


def _plan(arguments: Namespace) -> None:
    from moe_coverage_plugin.cli.plan import run

    run(arguments)


def _inspect(arguments: Namespace) -> None:
    from moe_coverage_plugin.cli.inspection import run

    run(arguments)


def _eval(arguments: Namespace) -> None:
    from moe_coverage_plugin.cli.evaluation import run

    run(arguments)


def _pareto(arguments: Namespace) -> None:
    from moe_coverage_plugin.report.pareto import read_results, write_pareto

    write_pareto(read_results(Path(arguments.results)), Path(arguments.output))
    print(f"Wrote {arguments.output}")
