"""Finds the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

# every kind of tokenizer has at least one of these files
NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(directory: Path) -> bool:
    """Return whether ``AutoTokenizer`` finds a file to open."""
    return any((directory / name).is_file() for name in NAMES)
