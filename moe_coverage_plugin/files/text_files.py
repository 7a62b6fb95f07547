"""Mistakes in files of text that are certain before a tokenizer can be opened, which takes ten seconds and more."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_coverage_plugin.manifest import CoverageError

# loaders of `datasets` by suffix; any other file is text, one document
LOADERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
# columns of chats: lists of messages with roles
CHATS = ("messages", "conversations")
MOST_LINE_BYTES = 1 << 20

# Bounds of the tokens that a byte becomes in any tokenizer; a token takes one byte of normalized text or more
# ASCII stays one byte, except that spaces become U+2581, before which a tokenizer can put another U+2581
_OF_ASCII = 4
# NFKC makes 33 bytes of the 3 of U+FDFA, some of them spaces; the rest is room for U+2581 before each character
_OF_OTHERS = 32
# JSON writes any character as an escape
_OF_ESCAPES = 3 * _OF_OTHERS
# tokens that begin and end a document
_OF_DOCUMENTS = 16
# these do not make text longer than the above
_NORMALIZERS = ("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace")
_WHITE_SPACE_MARK = "\u2581"
# beginnings of compressed files that are also UTF-8
_COMPRESSED = (b"PK", b"BZh", b"Rar!", b'\4"M\x18')


def check_text_files(paths: Sequence[Path], field: str, tokenizer: Path | None, tokens: int) -> None:
    """Check the columns of files, and that they can have enough tokens, as far as this is certain.

    Args:
        paths: files that can be read.
        field: the column of the text in files with rows.
        tokenizer: directory of the tokenizer; ``None`` if it is not on this machine.
        tokens: of one window.

    Raises:
        CoverageError: no such column, or less than one window.
    """
    for path in paths:
        if (columns := first_row(path)) and not isinstance(columns.get(field), str):
            raise CoverageError(no_text(f"{path} row 1", field, columns))
    most = sum(most_tokens(path, tokens) for path in paths)
    if most == 0 or (most < tokens and tokenizer is not None and keeps_bounds(tokenizer)):
        names = ", ".join(path.name for path in paths)
        count = f"at most {most:.0f}" if most else "0"
        raise CoverageError(f"{names} has {count} tokens, fewer than one window of {tokens}: give more text")


def no_text(where: str, column: str, columns: Iterable[str]) -> str:
    """Return the message for rows whose column is absent or has no text."""
    columns = list(columns)
    if column in columns:
        return f"{where} has a value in {column!r} that is not text: correct it, or name another column"
    if chats := [name for name in CHATS if name in columns]:
        remedy = f"make text of {chats[0]!r} by tokenizer.apply_chat_template(..., tokenize=False), or name a column"
    else:
        remedy = "name the column of the text (--text-field, or text_column of oneshot)"
    return f"{where} has no text in {column!r}, only {', '.join(columns)}: {remedy}"


def first_row(path: Path) -> dict[str, Any]:
    """Return the values of the first row by column, ``""`` for text of unknown content; empty if it is not certain."""
    loader = LOADERS.get(path.suffix)
    try:
        if loader == "parquet":
            from pyarrow.parquet import read_schema

            return dict.fromkeys(read_schema(path).names, "")
        if loader is None:
            return {}
        with path.open("rb") as file:
            line = file.readline(MOST_LINE_BYTES)
        if not _is_plain(line):
            return {}
        text = line.decode("utf-8-sig")
        row = json.loads(text) if loader == "json" else dict.fromkeys(next(csv.reader([text], strict=True)), "")
    except Exception:  # the loader describes what is wrong with the file
        return {}
    return row if isinstance(row, dict) else {}


def most_tokens(path: Path, enough: int) -> float:
    """Return a bound of the tokens in a file; infinity from ``enough`` bytes on, or if bytes do not bound them."""
    loader = LOADERS.get(path.suffix, "text")
    if loader == "parquet":
        return _rows_of_parquet(path) and math.inf
    if path.stat().st_size >= enough:
        return math.inf
    content = path.read_bytes()
    if not _is_plain(content):
        return math.inf
    ascii_bytes = sum(byte < 128 for byte in content)
    bound = _OF_ASCII * ascii_bytes + _OF_OTHERS * (len(content) - ascii_bytes)
    if loader == "json":
        bound += _OF_ESCAPES * content.count(b"\\")
    # an object of JSON has a colon, and a row of CSV has a line
    documents = {"text": int(bool(content)), "json": content.count(b":"), "csv": len(content.splitlines())}[loader]
    return bound + _OF_DOCUMENTS * documents


def keeps_bounds(tokenizer: Path) -> bool:
    """Return whether the tokenizer is of a kind that keeps the bounds of :func:`most_tokens`."""
    try:
        described = json.loads((tokenizer / "tokenizer.json").read_bytes())
        model, normalizers = described["model"], list(_parts(described.get("normalizer"), "normalizers"))
        processors = list(_parts(described.get("post_processor"), "processors"))
        marks = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        around = sum(len(each.get("single", ())) for each in processors)
        return not marks and around < _OF_DOCUMENTS - 2 and all(map(_keeps_length, normalizers))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    kind, content = normalizer["type"], normalizer.get("content", "")
    if kind == "Prepend":
        return normalizer["prepend"] == _WHITE_SPACE_MARK
    if kind == "Replace":
        # a regular expression can match between any two characters
        pattern = normalizer["pattern"].get("String")
        return bool(pattern) and (content == _WHITE_SPACE_MARK or len(content.encode()) <= len(pattern.encode()))
    return kind in _NORMALIZERS


def _parts(described: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    if described is None:
        return
    yield described
    for part in described.get(inner, ()):
        yield from _parts(part, inner)


def _rows_of_parquet(path: Path) -> float:
    try:
        from pyarrow.parquet import read_metadata

        return read_metadata(path).num_rows
    except Exception:  # the loader describes what is wrong with the file
        return math.inf


def _is_plain(content: bytes) -> bool:
    """Whether bytes are text: `datasets` decompresses files by their first bytes."""
    if content.startswith(_COMPRESSED):
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
