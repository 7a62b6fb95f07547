"""Lets a model write calibration text: draws documents until enough are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import SamplingOptions
from moe_coverage_plugin.sampling.engines import Engine
from moe_coverage_plugin.sampling.repetition import fingerprint, looping_tokens
from moe_coverage_plugin.sampling.turns import Turn, chat_turns, text_turns

# documents of a round for each window, and tokens that may be drawn for each one that is needed
MOST_DRAWS = MOST_TOKENS = 20
# first seeds of two rounds differ by more than any round has documents
SEEDS_OF_A_ROUND = 1 << 20


@dataclass
class Sampled:
    """Documents that a model wrote.

    Attributes:
        documents: token ids of each document, with the tokens that begin and end it.
        texts: the same as text; chats have the special tokens of their template.
        provenance: model, options, versions, and how many documents were left out and why.
    """

    documents: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write JSON lines with ``text``, ``tokens`` and, in the first row, the provenance; atomically."""
        rows: list[dict[str, Any]] = [
            {"text": text, "tokens": len(ids)} for text, ids in zip(self.texts, self.documents, strict=True)
        ]
        rows[0]["provenance"] = self.provenance
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(len, self.documents))


def sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    options: SamplingOptions,
    model: str = "",
) -> Sampled:
    """Let a model write documents, until they fill ``options.samples`` windows of ``options.length`` tokens.

    A document that ends in a loop, or repeats another one, is left out and counted.

    Args:
        engine: draws from the model.
        tokenizer: of the model.
        config: of the model.
        options: how many, how long, and how they are drawn.
        model: name of the model, for the provenance.

    Raises:
        CoverageError: the model has no start token or chat template, its context is too short, or it writes too few
            documents that are neither loops nor duplicates.
    """
    chat = options.form == "chat" or (options.form == "auto" and bool(tokenizer.chat_template))
    turns = chat_turns(tokenizer, config) if chat else text_turns(tokenizer, config)
    length = _length(options.length, turns, config)
    needed = options.samples * length
    kept, seen, left_out = Sampled(), set[str](), {"loops": 0, "duplicates": 0}
    number, rounds, drawn, tokens, written = options.samples, 0, 0, 0, 0
    while number and tokens < needed and written < MOST_TOKENS * needed:
        documents = _draw(engine, turns, number, length, options.seed + SEEDS_OF_A_ROUND * rounds)
        rounds, written = rounds + 1, written + sum(map(len, documents))
        for ids in documents:
            text = tokenizer.decode(ids, skip_special_tokens=not chat)
            assert isinstance(text, str)
            if looping_tokens(ids):
                left_out["loops"] += 1
            elif (mark := fingerprint(text)) in seen:
                left_out["duplicates"] += 1
            elif tokens < needed:
                seen.add(mark)
                tokens += len(ids)
                kept.documents.append(ids)
                kept.texts.append(text)
        drawn = len(kept.documents) + sum(left_out.values())
        # as many as are missing at the rate of kept tokens so far; none if nothing was kept
        missing = ceil((needed - tokens) * drawn / tokens) if tokens else 0
        number = min(missing, MOST_DRAWS * options.samples)
    if tokens < needed:
        raise CoverageError(
            f"of {drawn} documents that the model wrote, {left_out['loops']} end in loops and "
            f"{left_out['duplicates']} repeat others, which leaves {tokens} of {needed} tokens: sample with "
            "temperature=1.0, with form='text', or give text of your own"
        )
    kept.provenance = {
        "text": "written by the model itself",
        "model": model,
        "form": "chat" if chat else "text",
        **options.model_dump(include={"samples", "temperature", "seed"}),
        "length": length,
        "documents": len(kept.documents),
        "left_out": left_out,
        "engine": type(engine).__name__,
        "versions": {name: version(name) for name in ("moe-coverage-plugin", "torch", "transformers")},
    }
    logger.info(
        f"The model wrote {len(kept.documents)} documents of {tokens} tokens; {left_out['loops']} more end in "
        f"loops and {left_out['duplicates']} repeat others"
    )
    return kept


def document_length(wanted: int, config: PretrainedConfig) -> int:
    """Return the most tokens of a document, which the context of the model limits."""
    return min(wanted, getattr(config.get_text_config(), "max_position_embeddings", None) or wanted)


def _length(wanted: int, turns: list[Turn], config: PretrainedConfig) -> int:
    """Tokens of a document within the model's context.

    Raises:
        CoverageError: what comes before the turns leaves no room for them.
    """
    length = document_length(wanted, config)
    if length < wanted:
        logger.warning(f"The context of the model has {length} tokens, fewer than {wanted}: documents are that long")
    given = sum(len(turn.before) for turn in turns)
    if given >= length:
        raise CoverageError(
            f"the chat template takes {given} tokens, which leaves none of {length} for the chat: choose a larger "
            "length, or form='text'"
        )
    return length


def _draw(engine: Engine, turns: list[Turn], number: int, length: int, seed: int) -> list[list[int]]:
    """Documents with all of their turns; one that reaches the length within a turn ends there."""
    documents: list[list[int]] = [[] for _ in range(number)]
    unfinished = list(range(number))
    for turn in turns:
        # the token that ended the turn before is not part of the template
        prompts = {index: _without_stop(documents[index], turns) + turn.before for index in unfinished}
        unfinished = [index for index in unfinished if len(prompts[index]) < length]
        drawn = engine([prompts[index] for index in unfinished], turn.stops, length, seed)
        for index, ids in zip(unfinished, drawn, strict=True):
            documents[index] = prompts[index] + ids
        unfinished = [index for index in unfinished if documents[index][-1] in turn.stops]
    first, *_ = turns
    # a token that ends documents and begins them belongs to the document before
    begins_with_end = len(first.before) == 1 and first.before[0] in first.stops
    return [ids[1:] if begins_with_end else ids for ids in documents]


def _without_stop(ids: list[int], turns: list[Turn]) -> list[int]:
    return ids[:-1] if ids and any(ids[-1] in turn.stops for turn in turns) else ids
