"""How to install this package with an extra, for messages: it is on no package index, as README says."""

from __future__ import annotations

from moe_coverage_plugin.manifest import PLUGIN

PLACE = f"in a clone of {PLUGIN}"


def install_command(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs this package with extras, for use in a clone of its repository."""
    return f'{pip} install ".[{",".join(extras)}]"'


def how_to_install(*extras: str, pip: str = "pip") -> str:
    """Return the command and the place where it works, for the end of a message."""
    return f"{install_command(*extras, pip=pip)} {PLACE}; its wheel takes the same extra"
