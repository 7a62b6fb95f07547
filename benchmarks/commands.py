"""Command lines for results, without paths of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def portable(module: str, arguments: Sequence[str], without: Collection[str]) -> str:
    """Return the command that repeats a measurement elsewhere.

    Args:
        module: module for ``python -m``.
        arguments: its arguments; files outside of the working directory are named without their directory.
        without: options that change no figure, each with a value.
    """
    left_out = {index + offset for index, each in enumerate(arguments) if each in without for offset in (0, 1)}
    kept = (_portable(each) for index, each in enumerate(arguments) if index not in left_out)
    return shlex.join(["python", "-m", module, *kept])


def _portable(argument: str) -> str:
    name, separator, path = argument.rpartition("=")
    if "/" not in path:
        return argument
    place, here = Path(path).resolve(), Path.cwd()
    return f"{name}{separator}{place.relative_to(here) if place.is_relative_to(here) else place.name}"
