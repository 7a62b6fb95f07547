"""Random requests of several kinds, which repeat with the seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

KINDS: dict[str, int] = {"greedy": 4, "sampled": 3, "several": 1, "logprobs": 1, "long": 1}
"""Kinds of requests and how often each is drawn, also with several answers or log-probabilities of the prompt."""

COMPARED = ("greedy", "long")
"""Kinds whose tokens are the most likely ones, so that answers can be compared."""

ABORTED = 0.1
PREFIXES, WITH_PREFIX = 4, 0.25
STEPS_BEFORE_ABORT = 40
SEVERAL, LOGPROBS, PROMPT_LOGPROBS = 3, 5, 2


class Request(NamedTuple):
    """A request to an engine.

    Attributes:
        kind: one of ``KINDS``.
        prompt_ids: tokens of the prompt.
        new: tokens to generate, for each answer.
        answers: number of answers.
        sampling: other arguments of ``SamplingParams``.
        abort_after: steps of the engine after which it is aborted unless it has finished, or ``None``.
    """

    kind: str
    prompt_ids: list[int]
    new: int
    answers: int
    sampling: dict[str, Any]
    abort_after: int | None


class Traffic:
    """Draws requests for an engine of ``max_model_len`` tokens: short prompts and answers, and prompts nearly as long.

    A quarter of the prompts begins with one of four prefixes, so that the engine's cache of prefixes is used.
    """

    def __init__(self, seed: int, vocabulary: int, max_model_len: int) -> None:
        self.random = random.Random(seed)
        self.vocabulary, self.limit = vocabulary, max_model_len
        self.prefixes = [self._tokens(max_model_len // 16) for _ in range(PREFIXES)]

    def draw(self) -> Request:
        """Return the next request."""
        limit = self.limit
        [kind] = self.random.choices(list(KINDS), list(KINDS.values()))
        new = self.random.randint(limit // 64 + 1, limit // 16)
        shortest, longest = (limit // 2, limit - 2 * (limit // 16)) if kind == "long" else (limit // 64, limit // 8)
        prompt_ids = self._tokens(self.random.randint(shortest, longest))
        if self.random.random() < WITH_PREFIX:
            prompt_ids = self.random.choice(self.prefixes) + prompt_ids
        answers, sampling = 1, {"temperature": 1.0, "top_p": 0.9}
        if kind in COMPARED:
            sampling = {"temperature": 0.0, "logprobs": 0}
        elif kind == "several":
            answers = SEVERAL
        elif kind == "logprobs":
            sampling |= {"logprobs": LOGPROBS, "prompt_logprobs": PROMPT_LOGPROBS}
        aborted = self.random.random() < ABORTED
        abort_after = self.random.randint(1, STEPS_BEFORE_ABORT) if aborted else None
        return Request(kind, prompt_ids, new, answers, sampling, abort_after)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]
