"""Tells whether a tokenizer lies in a directory."""

from __future__ import annotations

from pathlib import Path

# one of them is there whatever the tokenizer's kind
NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(directory: Path) -> bool:
    """Whether ``AutoTokenizer`` would find something to open."""
    return any((directory / name).is_file() for name in NAMES)
