"""Flags of the command line from the fields of option classes: choices, types, defaults and help."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from typing import Any, TypeVar, cast

from moe_coverage_plugin.options import Options
from moe_coverage_plugin.options.base import choices, kind, summary

METAVARS = {int: "N", float: "X", str: "NAME"}
AnyOptions = TypeVar("AnyOptions", bound=Options)


def add_flags(group: Any, options: type[Options], *names: str) -> None:
    """Add a flag for each named field, or for every field; flags that are not given are not in the namespace.

    Args:
        group: parser, or group of a parser.
        options: class of the fields.
        names: of the fields.
    """
    for name in names or options.model_fields:
        field = options.model_fields[name]
        text = summary(field).replace("%", "%%")
        kwargs: dict[str, Any] = {"default": SUPPRESS, "required": field.is_required(), "help": text}
        if kind(field) is bool:
            kwargs |= {"action": "store_true", "help": text.removeprefix("whether to ")}
        elif found := choices(field):
            kwargs["choices"] = found
        else:
            kwargs |= {"type": kind(field), "metavar": METAVARS[kind(field)]}
        if field.default is not None and not field.is_required() and kind(field) is not bool:
            kwargs["help"] = f"{text} (default: {field.default})"
        group.add_argument(f"--{name.replace('_', '-')}", **kwargs)


def from_flags(options: type[AnyOptions], arguments: Namespace, **others: Any) -> AnyOptions:
    """Make options from the flags that were given; errors name fields as flags.

    Args:
        options: class of the options.
        arguments: parsed command line.
        others: values of fields that have no flag of :func:`add_flags`.

    Raises:
        CoverageError: a value outside of its range, or values that contradict each other.
    """
    as_flags = cast("type[AnyOptions]", type(options.__name__, (options,), {"as_flags": True}))
    given = {name: value for name, value in vars(arguments).items() if name in options.model_fields}
    return as_flags(**given | others)
