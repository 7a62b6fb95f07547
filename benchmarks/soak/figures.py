"""Figures of a run: how memory changes after the warm-up, and how answers differ from those of single requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

Figures = dict[str, Any]


class Sample(NamedTuple):
    """Memory at one moment.

    Attributes:
        seconds: since the load began.
        device: bytes in use on the card, of all processes; the card with most of several; ``None`` without a card.
        host: resident bytes without a file, of all processes of the engine.
    """

    seconds: float
    device: int | None
    host: int


class Answer(NamedTuple):
    """Tokens that one request got under load, and what single requests got for the same prompt.

    Attributes:
        tokens: the most likely tokens under load.
        logprobs: their log-probabilities under load.
        as_prompt: their log-probabilities if they are a part of the prompt of a single request.
        alone: the most likely tokens of a single request.
        alone_logprobs: their log-probabilities.
    """

    tokens: list[int]
    logprobs: list[float]
    as_prompt: list[float]
    alone: list[int]
    alone_logprobs: list[float]


def memory(samples: Sequence[Sample], warm_up: float) -> Figures:
    """Return first and last value, slope per minute and growth of each kind of memory after ``warm_up`` seconds.

    The slope is that of the line with the least squared errors, and growth is the slope times the time that remains.
    """
    kept = [sample for sample in samples if sample.seconds >= warm_up]
    found: Figures = {}
    for kind in ("device", "host"):
        points = [(sample.seconds / 60, value) for sample in kept if (value := getattr(sample, kind)) is not None]
        if len(points) > 1:
            slope = statistics.linear_regression(*zip(*points, strict=True)).slope
            found[kind] = {
                "first": points[0][1],
                "last": points[-1][1],
                "most": max(value for _, value in points),
                "slope_per_minute": slope,
                "growth": slope * (points[-1][0] - points[0][0]),
            }
    return found


def comparison(answers: Sequence[Answer]) -> Figures:
    """Compare answers under load with those of single requests.

    Other requests in a batch change the order of sums, so the same token may get another log-probability in the last
    bits, and of two tokens that are about as likely the other one may be chosen. Its successors are then not
    comparable. So log-probabilities are compared for the tokens that were generated under load, which a single request
    gets as a part of its prompt; the agreement of tokens is counted up to the first difference.

    Returns:
        ``answers``, ``tokens``; ``median_difference`` and ``worst_answer`` (the largest of the medians of answers) of
        log-probabilities; ``equal_answers``; ``tokens_before_difference`` of those in ``tokens``; and
        ``largest_gap``, by which the token chosen under load is less likely at the first difference.
    """
    if not answers:
        return {"answers": 0}
    differences = [[abs(a - b) for a, b in zip(each.logprobs, each.as_prompt, strict=True)] for each in answers]
    before, gaps = [], []
    for each in answers:
        equal = [a == b for a, b in zip(each.tokens, each.alone, strict=True)]
        first = equal.index(False) if False in equal else None
        before.append(len(equal) if first is None else first)
        if first is not None:
            gaps.append(each.alone_logprobs[first] - each.as_prompt[first])
    return {
        "answers": len(answers),
        "tokens": sum(len(each.tokens) for each in answers),
        "median_difference": statistics.median(value for each in differences for value in each),
        "worst_answer": max(statistics.median(each) for each in differences),
        "equal_answers": len(answers) - len(gaps),
        "tokens_before_difference": sum(before),
        "largest_gap": max(gaps, default=None),
    }


def failures(figures: Figures, tolerance: float, growth: float) -> list[str]:
    """Return what does not hold: memory of the card that grows, or answers that differ."""
    found = []
    grown = figures["memory"].get("device", {}).get("growth", 0.0)
    if grown > growth:
        found.append(f"memory of the card grew by {grown:,.0f} bytes after the warm-up, more than {growth:,.0f}")
    worst = figures["comparison"].get("worst_answer", 0.0)
    if not worst <= tolerance:
        found.append(f"log-probabilities of an answer differ by a median of {worst:.3f}, more than {tolerance}")
    return found
