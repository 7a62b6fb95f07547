"""The command ``moe-coverage``: compress a model, plan, inspect and evaluate checkpoints, compare results.

A subcommand is imported when it is used, because torch and llm-compressor take seconds to import. Those that do not
compress run in vLLM's environment, too, where llm-compressor is not installed.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from moe_coverage_plugin.cli.arguments import build_parser
from moe_coverage_plugin.cli.early import CHECKS
from moe_coverage_plugin.cli.environment import check_toolkit, not_installed
from moe_coverage_plugin.manifest import CoverageError

USER_ERROR, INTERRUPTED = 2, 130
# modules of the subcommands
COMMANDS = {
    "oneshot": "oneshot",
    "sample": "sample",
    "finetune": "finetune",
    "plan": "plan",
    "inspect": "inspection",
    "eval": "evaluation",
    "pareto": "pareto",
}
TOOLKIT_COMMANDS = ("oneshot", "finetune")
RESUMED_COMMANDS = ("oneshot", "finetune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        The exit status: after one line on stderr, 2 for a mistake that the user can correct, 130 if the user stopped.
    """
    arguments = build_parser({name: partial(_run, name) for name in COMMANDS}).parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output, such as head, has ended; Python would report the rest of the output at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CoverageError as error:
        return _fail(str(error))
    except KeyboardInterrupt as interrupt:
        return _fail(f"interrupted{interrupt}", INTERRUPTED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == __name__.partition(".")[0]:
            raise
        return _fail(not_installed(package))
    return 0


def _run(command: str, arguments: Namespace) -> None:
    # before the import of the subcommand, which can take seconds
    if command in TOOLKIT_COMMANDS:
        check_toolkit(command)
    CHECKS[command](arguments)
    try:
        import_module(f"{__name__}.{COMMANDS[command]}").run(arguments)
    except KeyboardInterrupt:
        again = ": give the same command again to go on" if command in RESUMED_COMMANDS else ""
        raise KeyboardInterrupt(again) from None


def _fail(message: str, status: int = USER_ERROR) -> int:
    # a name from a damaged file can contain line breaks
    print("moe-coverage:", " ".join(message.split()), file=sys.stderr)
    return status
