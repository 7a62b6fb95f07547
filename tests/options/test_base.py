"""Wrong values stop when options are made, with one sentence: field, value, limit and remedy."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, model_validator

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import Options
from moe_coverage_plugin.options.base import choices, kind, summary


class Example(Options):
    """One field of each kind."""

    share: float = Field(default=0.5, ge=0, lt=1)
    """Share of the whole.

    More about it, which is not part of the ``summary``.
    """

    count: int = Field(default=1, ge=1)
    """Number of ``parts``."""

    decay: float | None = Field(default=None, gt=0, le=1)
    """MoE decay."""

    shape: Literal["round", "square"] = "round"
    """Shape."""

    size: Literal["wide", "narrow"] | None = None

    names: list[str] = Field(default_factory=list)
    """Names of parts."""

    draw: bool = True

    path: str | None = None


class Flags(Example):
    as_flags: ClassVar[bool] = True


class Switched(Options):
    mode: Literal["plain", "fancy"] = "plain"
    glitter: int = 3
    ribbon: bool = False

    @model_validator(mode="after")
    def _check(self):
        self.refuse_idle("mode", "fancy", "glitter", "ribbon")
        return self


def error(options: type[Options], **values: Any) -> str:
    with pytest.raises(CoverageError) as caught:
        options(**values)
    assert caught.value.__cause__ is None, "pydantic's report would be printed as well"
    message = str(caught.value)
    assert "\n" not in message
    assert not re.search(r"\w\. ", message), "one sentence"
    return message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 25}, "share=25 of Example must be a number, at least 0 and below 1: did you mean 0.25?"),
        ({"share": 1}, "share=1 of Example must be a number, at least 0 and below 1 (share of the whole)"),
        ({"share": -0.1}, "share=-0.1 of Example must be a number, at least 0 and below 1 (share of the whole)"),
        ({"share": math.nan}, "share=nan of Example must be a number, at least 0 and below 1 (share of the whole)"),
        ({"share": "much"}, "share='much' of Example must be a number, at least 0 and below 1 (share of the whole)"),
        ({"share": None}, "share=None of Example must be a number, at least 0 and below 1 (share of the whole)"),
        ({"count": 0}, "count=0 of Example must be an integer, at least 1 (number of parts)"),
        ({"count": 1.5}, "count=1.5 of Example must be an integer, at least 1 (number of parts)"),
        ({"decay": 90}, "decay=90 of Example must be a number, above 0 and at most 1, or None: did you mean 0.9?"),
        ({"decay": 0}, "decay=0 of Example must be a number, above 0 and at most 1, or None (MoE decay)"),
        ({"shape": "squared"}, "shape='squared' of Example must be one of round, square: did you mean square?"),
        ({"shape": 3}, "shape=3 of Example must be one of round, square"),
        ({"size": "fp8"}, "size='fp8' of Example must be one of wide, narrow, or None"),
        ({"names": "abc"}, "names='abc' of Example must be a list of strings (names of parts)"),
        ({"names": ["a", 3]}, "names=3 of Example must be a list of strings (names of parts)"),
        ({"draw": "perhaps"}, "draw='perhaps' of Example must be true or false"),
        ({"path": 3}, "path=3 of Example must be a string, or None"),
        ({"shap": "round"}, "shap='round' of Example is not an option: did you mean shape?"),
        (
            {"xyz": [1] * 99},
            "xyz=[1, 1, 1, 1, 1, 1, ...] of Example is not an option: known are share, count, decay, shape, size, "
            "names, draw, path",
        ),
    ],
)
def test_sentences(values: dict[str, Any], message: str) -> None:
    assert error(Example, **values) == message


def test_a_field_that_must_be_given() -> None:
    class Required(Options):
        share: float = Field(ge=0)
        """Share of the whole."""

    assert error(Required) == "share of Required is not given: set it (share of the whole)"


def test_command_lines_name_flags() -> None:
    assert error(Flags, share=25).startswith("--share 25 must be a number")
    assert error(Flags, shape="flat") == "--shape flat must be one of round, square"


def test_what_has_no_effect_is_an_error() -> None:
    message = (
        "glitter=5 would do nothing with mode='plain', the default of Switched: leave it out, or use mode='fancy'"
    )
    assert error(Switched, glitter=5) == message
    assert error(Switched, mode="plain", glitter=5) == message.replace(", the default", "")
    assert "glitter=5 and ribbon=True would do nothing" in error(Switched, glitter=5, ribbon=True)
    Switched(mode="fancy", glitter=5, ribbon=True)


def test_a_recipe_with_all_fields_written_out_is_accepted() -> None:
    assert Switched(**Switched().model_dump()) == Switched()
    # without the switch, the field was written for another default of it
    assert "glitter=3 would do nothing" in error(Switched, glitter=3)


def test_fields_describe_flags() -> None:
    fields = Example.model_fields
    assert summary(fields["share"]) == "share of the whole"
    assert summary(fields["count"]) == "number of parts"
    assert summary(fields["decay"]) == "MoE decay"
    assert choices(fields["shape"]) == ("round", "square")
    assert choices(fields["size"]) == ("wide", "narrow")
    assert choices(fields["share"]) == ()
    kinds = {name: kind(field) for name, field in fields.items()}
    assert [kinds[name] for name in ("share", "count", "decay", "shape", "size")] == [float, int, float, str, str]
    assert [kinds[name] for name in ("names", "draw", "path")] == [list, bool, str]


def test_options_can_be_copied_and_compared() -> None:
    options = Example(share=0.25, names=["a"])
    assert copy.deepcopy(options) == options == Example(**options.model_dump())
    assert options.model_fields_set == {"share", "names"}
