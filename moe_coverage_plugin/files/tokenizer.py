"""Finds the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

# every kind of tokenizer has at least one of these files
NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# all that tokenizers are saved in, with their chat templates
FILES = (
    *NAMES,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "vocab.txt",
)


def has_tokenizer(directory: Path) -> bool:
    """Return whether ``AutoTokenizer`` finds a file to open."""
    return any((directory / name).is_file() for name in NAMES)
