"""Reads text to train on: windows of token ids, packed without padding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moe_coverage_plugin.manifest import CoverageError

JSON_LINES = (".jsonl", ".json", ".ndjson")
IDS = "input_ids"

Text = Sequence[str | Path] | Dataset


@dataclass(frozen=True)
class Windows:
    """Packed token ids.

    Attributes:
        ids_WS: ``[W, S]`` int64.
        source: names of the files, for people.
    """

    ids_WS: Tensor
    source: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the token ids and of the shape that they have."""
        header = repr(tuple(self.ids_WS.shape)).encode()
        return hashlib.sha256(header + self.ids_WS.contiguous().numpy().tobytes()).hexdigest()


def check_files(text: Text) -> None:
    """Refuse files that are not there, before anything is read.

    Raises:
        CoverageError: no file is named, or one is none.
    """
    if isinstance(text, Dataset):
        return
    if not text:
        raise CoverageError("there are 0 files of text, fine-tuning needs 1: name a text file or one of JSON lines")
    for path in map(Path, text):
        if not path.is_file():
            raise CoverageError(f"{path} is no file: give text, or JSON lines that hold it")


def pack(text: Text, tokenizer: PreTrainedTokenizerBase | None, field: str, length: int) -> Windows:
    """All documents one after another, cut into windows; the last tokens that fill none are left out.

    Attention reaches over the end of a document, as it does where models are trained from scratch.

    Args:
        text: files, each one document or JSON lines, or a data set of text or of ``input_ids``.
        tokenizer: not needed for token ids.
        field: what holds the text in JSON lines and data sets.

    Raises:
        CoverageError: no such field, a file that cannot be read, or less than one window.
    """
    source = "datasets.Dataset" if isinstance(text, Dataset) else ", ".join(Path(path).name for path in text)
    if isinstance(text, Dataset) and IDS in text.column_names:
        parts: Iterable[list[int]] = (row[IDS] for row in _rows(text))
    elif tokenizer is None:
        raise CoverageError("the checkpoint has no tokenizer: name a directory that has with tokenizer=...")
    else:
        parts = (_tokens(document, tokenizer) for document in _documents(text, field) if document)
    ids = [torch.tensor(part, dtype=torch.int64) for part in parts if len(part)]
    tokens = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    count = len(tokens) // length
    if count == 0:
        raise CoverageError(f"{source} holds {len(tokens)} tokens and a window has {length}: give more text")
    return Windows(tokens[: count * length].reshape(count, length).clone(), source)


def split(windows: Windows, held_out: float) -> tuple[Windows, Windows]:
    """What to train on, and the last windows, at least one, to measure on.

    Raises:
        CoverageError: there is one window only.
    """
    count = len(windows.ids_WS)
    last = max(1, round(held_out * count))
    if last >= count:
        raise CoverageError(
            f"{windows.source} holds {count} windows of {windows.ids_WS.shape[1]} tokens, of which {last} are held "
            "out and none is left to train on: give more text, or another one to evaluate on"
        )
    return (
        Windows(windows.ids_WS[:-last], windows.source),
        Windows(windows.ids_WS[-last:], f"last windows of {windows.source}"),
    )


def _tokens(document: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(document, verbose=False)[IDS]  # pyright: ignore[reportAssignmentType]
    end = getattr(tokenizer, "eos_token_id", None)
    return ids if not isinstance(end, int) or ids[-1:] == [end] else [*ids, end]


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    for row in dataset:
        assert isinstance(row, dict)
        yield row


def _documents(text: Text, field: str) -> Iterator[str]:
    if isinstance(text, Dataset):
        if field not in text.column_names:
            raise CoverageError(
                f"the data set has no column {field!r}, only {', '.join(text.column_names)}: name the one "
                "with the text"
            )
        yield from (str(row[field]) for row in _rows(text))
        return
    for path in map(Path, text):
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CoverageError(f"{path} cannot be read as text ({error}): give UTF-8") from error
        yield from _json_lines(path, content, field) if path.suffix in JSON_LINES else [content]


def _json_lines(path: Path, content: str, field: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CoverageError(f"{path} line {number} is no JSON ({error}): give one object a line") from error
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            raise CoverageError(f"{path} line {number} has no text in {field!r}: name the field that holds it")
        yield value[field]
