"""What a document begins with, and where the model stops: plain text, or both turns of a chat."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from moe_coverage_plugin.manifest import CoverageError

# stands for the user's message in a rendered template, which can trim white space but not change a word
PLACEHOLDER = "placeholder7413"


@dataclass(frozen=True)
class Turn:
    """A part of a document that the model writes.

    Attributes:
        before: token ids that precede it.
        stops: token ids that end it.
    """

    before: list[int]
    stops: frozenset[int]


def text_turns(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> list[Turn]:
    """The one turn of a plain document, which begins with the model's start token.

    A tokenizer without a start token has the token between documents in its place.

    Raises:
        CoverageError: there is neither.
    """
    # transformers makes these attributes at run time, and not every family has them
    starts = (getattr(each, "bos_token_id", None) for each in (tokenizer, config.get_text_config()))
    candidates = (*starts, *sorted(_ends(tokenizer, config)))
    start = next((token for token in candidates if isinstance(token, int)), None)
    if start is None:
        raise CoverageError(
            "the tokenizer and config.json name neither a start token nor an end token, and 1 is needed to begin a "
            "document: set bos_token_id in config.json"
        )
    return [Turn([start], _ends(tokenizer, config))]


def chat_turns(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> list[Turn]:
    """The turns of the user and of the assistant in the chat template.

    The user's turn begins where the template has the user's message. It ends with the first token of the text that
    the template has after the message.

    Raises:
        CoverageError: there is no chat template, or it does not contain the user's message.
    """
    if not tokenizer.chat_template:
        raise CoverageError("the tokenizer has no chat template, which form='chat' needs: sample with form='text'")
    rendered: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": PLACEHOLDER}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = rendered.partition(PLACEHOLDER)
    if not found:
        raise CoverageError(
            "the chat template leaves the user's message out, so the model cannot write it: sample with form='text'"
        )
    ids_before, ids_after = (_encode(tokenizer, text) for text in (before, after))
    ends = _ends(tokenizer, config)
    return [Turn(ids_before, ends | frozenset(ids_after[:1])), Turn(ids_after, ends)]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # the template has written the special tokens already
    return tokenizer.encode(text, add_special_tokens=False)


def _ends(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> frozenset[int]:
    """Tokens that end a document, of the tokenizer and of the config, which can list several."""
    ends: Any = getattr(config.get_text_config(), "eos_token_id", None)
    several = ends if isinstance(ends, Collection) else [ends]
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(token for token in (*several, own) if isinstance(token, int))
