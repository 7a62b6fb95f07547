"""The base class of all options: values are checked when an object is made, and each error is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from moe_coverage_plugin.manifest import CoverageError

KINDS = {
    float: "a number",
    int: "an integer",
    str: "a string",
    bool: "true or false",
    list: "a list of strings",
    dict: "a mapping",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Options(BaseModel):
    """Options that are checked when an object is made.

    The docstring below a field is its description. Its first paragraph is also the help of the command line.

    Attributes:
        as_flags: whether errors name a field as a flag of the command line, ``--min-width 64``.

    Raises:
        CoverageError: an unknown field, a value outside of its range, or fields that contradict each other.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    as_flags: ClassVar[bool] = False

    def __init__(self, **values: Any) -> None:
        """Check the values."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise CoverageError(_sentence(type(self), error.errors(include_url=False)[0])) from None

    @classmethod
    def spell(cls, name: str, value: object) -> str:
        """Return a field and its value as the user writes them."""
        return f"--{name.replace('_', '-')} {value}" if cls.as_flags else f"{name}={short(value)}"

    def refuse_idle(self, switch: str, needed: object, *names: str) -> None:
        """Stop if a field is set that has an effect only if ``switch`` is ``needed``.

        If ``switch`` is set too, fields may be set to their defaults: the recipe that llm-compressor writes beside a
        checkpoint lists all fields.

        Args:
            switch: name of the field that decides.
            needed: its value with which the other fields have an effect.
            names: of the other fields.

        Raises:
            CoverageError: names the fields that have no effect, and both ways to go on.
        """
        given, found, fields = self.model_fields_set, getattr(self, switch), type(self).model_fields
        if found == needed:
            return
        changed = {name for name in names if name in given and getattr(self, name) != fields[name].default}
        if idle := [name for name in names if name in (changed if switch in given else given)]:
            spelled = " and ".join(self.spell(name, getattr(self, name)) for name in idle)
            setting = f"{self.spell(switch, found)}{'' if switch in given else ', the default'}{_owner(type(self))}"
            remedy = f"leave {'it' if len(idle) == 1 else 'them'} out, or use {self.spell(switch, needed)}"
            raise CoverageError(f"{spelled} would do nothing with {setting}: {remedy}")


def summary(field: FieldInfo) -> str:
    """Return the first paragraph of a field's description as a phrase: one line, no markup, no full stop."""
    paragraph = (field.description or "").partition("\n\n")[0]
    text = " ".join(paragraph.replace("``", "").split()).removesuffix(".")
    first, space, rest = text.partition(" ")
    return f"{first.lower() if first[1:].islower() else first}{space}{rest}"


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the strings that a field accepts, none if it is not a choice among strings."""
    return tuple(choice for each in _kinds(field) if get_origin(each) is Literal for choice in get_args(each))


def kind(field: FieldInfo) -> type:
    """Return the Python type of a field's values, which may also be ``None``."""
    found = next(each for each in _kinds(field) if each is not NoneType)
    return str if get_origin(found) is Literal else get_origin(found) or found


def _sentence(options: type[Options], error: Mapping[str, Any]) -> str:
    """Name field, value, limit and remedy."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    name, value, owner = str(error["loc"][0]), error["input"], _owner(options)
    if error["type"] == "missing":
        return f"{name}{owner} is not given: set it{_meaning(options.model_fields[name])}"
    if name not in options.model_fields:
        known = list(_own_fields(options))
        close = get_close_matches(name, known, n=1, cutoff=0.5)
        remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return f"{options.spell(name, value)}{owner} is not an option: {remedy}"
    field = options.model_fields[name]
    return f"{options.spell(name, value)}{owner} must be {_allowed(field)}{_hint(field, value)}"


def _owner(options: type[Options]) -> str:
    return "" if options.as_flags else f" of {options.__name__}"


def _own_fields(options: type[Options]) -> Iterator[str]:
    """Names of the fields that options classes define, without those that the toolkit gives each modifier."""
    inherited = {
        name
        for base in options.__mro__
        if issubclass(base, BaseModel) and not issubclass(base, Options)
        for name in base.model_fields
    }
    return (name for name in options.model_fields if name not in inherited)


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _allowed(field: FieldInfo) -> str:
    """Describe the values that a field accepts: ``a number, at least 0 and below 1, or None``."""
    bounds = [
        f"{word} {getattr(limit, bound):g}"
        for limit in field.metadata
        for bound, word in BOUNDS.items()
        if hasattr(limit, bound)
    ]
    values = f"one of {', '.join(found)}" if (found := choices(field)) else KINDS[kind(field)]
    parts = [values, " and ".join(bounds), "or None" if NoneType in _kinds(field) else ""]
    return ", ".join(filter(None, parts))


def _hint(field: FieldInfo, value: object) -> str:
    """Guess what was meant, a fraction for a percentage or a choice that is spelled alike; otherwise the meaning."""
    below_one = any(1 in (getattr(limit, "lt", None), getattr(limit, "le", None)) for limit in field.metadata)
    if below_one and (percent := _percent(value)) is not None and 1 < percent <= 100:
        return f": did you mean {percent / 100:g}?"
    if isinstance(value, str) and (close := get_close_matches(value, choices(field), n=1)):
        return f": did you mean {close[0]}?"
    return _meaning(field)


def _percent(value: object) -> float | None:
    """The number of a percentage, written as a number or as ``25`` or ``25 %`` in quotes."""
    try:
        return float(value.rstrip().removesuffix("%")) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _meaning(field: FieldInfo) -> str:
    return f" ({found})" if (found := summary(field)) and not choices(field) else ""
