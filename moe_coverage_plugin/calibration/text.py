"""Reads text from files and data sets, and packs it into windows of token ids without padding."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moe_coverage_plugin.files.text_files import LOADERS, no_text
from moe_coverage_plugin.manifest import CoverageError

IDS = "input_ids"

Text = Sequence[str | Path] | Dataset


@dataclass(frozen=True)
class Windows:
    """Packed token ids.

    Attributes:
        ids_WS: ``[W, S]`` int64.
        source: names of the files, for messages and cards.
    """

    ids_WS: Tensor
    source: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the token ids and their shape."""
        header = repr(tuple(self.ids_WS.shape)).encode()
        return hashlib.sha256(header + self.ids_WS.contiguous().numpy().tobytes()).hexdigest()


def check_files(text: Text) -> None:
    """Check that all files exist, before anything is read.

    Raises:
        CoverageError: no file is given, or one does not exist.
    """
    if isinstance(text, Dataset):
        return
    if not text:
        raise CoverageError("there are 0 files of text, but at least 1 is needed: give text or JSON lines")
    for path in map(Path, text):
        if not path.is_file():
            raise CoverageError(f"{path} is not a file: give text, JSON lines, Parquet or CSV")


def pack(text: Text, tokenizer: PreTrainedTokenizerBase | None, field: str, length: int) -> Windows:
    """Concatenate all documents and cut them into windows; tokens after the last full window are left out.

    Attention crosses the ends of documents, as in pretraining.

    Args:
        text: files (a text file is one document; JSON lines, Parquet and CSV have one in each row), or a data set of
            text or of ``input_ids``.
        tokenizer: not needed for token ids.
        field: the column of the text.
        length: tokens of a window.

    Raises:
        CoverageError: no such field, a file that cannot be read, or less than one window.
    """
    source = "datasets.Dataset" if isinstance(text, Dataset) else ", ".join(Path(path).name for path in text)
    if isinstance(text, Dataset) and IDS in text.column_names:
        parts: Iterable[list[int]] = (row[IDS] for row in _rows(text))
    elif tokenizer is None:
        raise CoverageError("the checkpoint has no tokenizer: give a directory with one by tokenizer=...")
    else:
        parts = (_tokens(document, tokenizer) for document in _documents(text, field) if document)
    ids = [torch.tensor(part, dtype=torch.int64) for part in parts if len(part)]
    tokens = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    count = len(tokens) // length
    if count == 0:
        raise CoverageError(f"{source} has {len(tokens)} tokens, fewer than one window of {length}: give more text")
    return Windows(tokens[: count * length].reshape(count, length).clone(), source)


def split(windows: Windows, held_out: float) -> tuple[Windows, Windows]:
    """Windows to train on, and the last windows, at least one, for the held-out loss.

    Raises:
        CoverageError: no window is left to train on.
    """
    count = len(windows.ids_WS)
    last = max(1, round(held_out * count))
    if last >= count:
        raise CoverageError(
            f"{windows.source} has {count} windows of {windows.ids_WS.shape[1]} tokens, of which {last} are held out: "
            "give more text, or other text to evaluate on"
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
            raise CoverageError(no_text("the data set", field, text.column_names))
        yield from (str(row[field]) for row in _rows(text))
        return
    for path in map(Path, text):
        yield from _file_documents(path, field)


def _file_documents(path: Path, field: str) -> Iterator[str]:
    loader = LOADERS.get(path.suffix, "text")
    options: dict[str, Any] = {"sample_by": "document"} if loader == "text" else {}
    column = "text" if loader == "text" else field
    row = 0
    try:
        # streamed, so that no copy of the text is written into the cache of `datasets`
        files = glob.escape(str(path))
        rows = load_dataset(loader, data_files=files, split="train", streaming=True, **options)
        for row, values in enumerate(rows, 1):
            if not isinstance(values.get(column), str):
                raise CoverageError(no_text(f"{path} row {row}", column, values))
            yield values[column]
    except CoverageError:
        raise
    except Exception as error:  # the loaders raise whatever their parsers raise
        reason = " ".join(str(error).split()).replace(". ", ", ")
        raise CoverageError(
            f"{path} cannot be read as {loader} after row {row} ({type(error).__name__}: {reason}): give UTF-8 text, "
            "one JSON object per line, Parquet or CSV"
        ) from error
