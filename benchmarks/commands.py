"""Command lines as results quote them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def portable(module: str, arguments: Sequence[str], without: Collection[str]) -> str:
    """The command that measures the same elsewhere.

    Args:
        module: what ``python -m`` runs.
        arguments: its own; files outside the working directory are named without their place.
        without: options that change no figure, each with a value.
    """
    dropped = {index + offset for index, each in enumerate(arguments) if each in without for offset in (0, 1)}
    kept = (_portable(each) for index, each in enumerate(arguments) if index not in dropped)
    return shlex.join(["python", "-m", module, *kept])


def _portable(argument: str) -> str:
    name, separator, path = argument.rpartition("=")
    if "/" not in path:
        return argument
    place, here = Path(path).resolve(), Path.cwd()
    return f"{name}{separator}{place.relative_to(here) if place.is_relative_to(here) else place.name}"
