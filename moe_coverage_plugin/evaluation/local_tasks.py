"""Makes tasks of lm-eval from local JSON lines and the templates beside this file, without a download."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from moe_coverage_plugin.manifest import CoverageError

TEMPLATES = Path(__file__).parent / "templates"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_choices(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(map(_is_text, value))


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


FIELDS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "multiple_choice": {
        "question": (_is_text, "text"),
        "choices": (_is_choices, "a list of two texts or more"),
        "answer": (_is_index, "the number of a choice, counted from 0"),
    },
    "text": {"text": (_is_text, "text")},
    "exact_match": {"question": (_is_text, "text"), "answer": (_is_text, "text")},
}
"""The fields of a line for each kind of task: a check of the value, and a description of valid values."""


@dataclass(frozen=True)
class LocalTask:
    """A task from a file of JSON lines, named like the file.

    Attributes:
        kind: ``multiple_choice``, ``text`` (perplexity) or ``exact_match`` (generation).
        file: one JSON object per line.
        fields: names of fields in the file that differ from the template's: ``{"question": "query"}``.

    Raises:
        CoverageError: an unknown kind or field.
    """

    kind: str
    file: Path
    fields: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FIELDS:
            raise CoverageError(f"there are no tasks of kind {self.kind!r}, only {', '.join(FIELDS)}")
        for name in self.fields:
            if name not in FIELDS[self.kind]:
                raise CoverageError(
                    f"{self.kind} has no field {name!r}, only {', '.join(FIELDS[self.kind])}: write OURS=YOURS"
                )
        for theirs in self.fields.values():
            if not theirs.isidentifier():
                raise CoverageError(
                    f"{theirs!r} is not an identifier, which templates need: rename the field in {self.file}"
                )

    @property
    def name(self) -> str:
        """The name of the file without its suffix."""
        return re.sub(r"\W+", "_", self.file.stem)

    def config(self) -> dict[str, Any]:
        """Return the config of the task for lm-eval.

        Raises:
            CoverageError: the file is absent or empty, or a line does not fit the template.
        """
        self._check_lines()
        config = yaml.safe_load((TEMPLATES / f"{self.kind}.yaml").read_text())
        for key, value in config.items():
            if key.startswith("doc_to_"):
                config[key] = re.sub(r"{{(\w+)}}", lambda match: "{{" + self._theirs(match[1]) + "}}", value)
        return config | {"task": self.name, "dataset_kwargs": {"data_files": {"test": str(self.file.absolute())}}}

    def _theirs(self, name: str) -> str:
        return self.fields.get(name, name)

    def _check_lines(self) -> None:
        try:
            # not splitlines: JSON allows other line separators inside of a string
            lines = self.file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CoverageError(f"{self.file} cannot be read as text ({error}): give a file of JSON lines") from error
        filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not filled:
            raise CoverageError(f"{self.file} has no lines: give one JSON object per line")
        for number, line in filled:
            self._check_line(number, line)

    def _check_line(self, number: int, line: str) -> None:
        where = f"{self.file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CoverageError(f"{where} is not JSON ({error}): give one JSON object per line") from error
        if not isinstance(row, dict):
            raise CoverageError(f"{where} is not a JSON object: give one per line")
        for name, (is_valid, wanted) in FIELDS[self.kind].items():
            theirs = self._theirs(name)
            if theirs not in row:
                raise CoverageError(f"{where} has no field {theirs!r}{_remedy(name, row)}")
            if not is_valid(row[theirs]):
                raise CoverageError(f"{where}: {theirs} is {str(row[theirs])[:60]!r}, but must be {wanted}")
        if self.kind == "multiple_choice":
            answer, choices = row[self._theirs("answer")], row[self._theirs("choices")]
            if answer >= len(choices):
                raise CoverageError(f"{where}: answer is {answer}, but the choices are 0 to {len(choices) - 1}")


def _remedy(name: str, row: Mapping[str, Any]) -> str:
    near = get_close_matches(name, row, n=1, cutoff=0.5)
    theirs = near[0] if near else next(iter(row), "NAME")
    return f", only {', '.join(row)}: name the right one by --fields {name}={theirs}"
