"""Finds documents that end in a loop, and documents that are there already."""

from __future__ import annotations

from collections.abc import Sequence

# tokens of the longest repeated passage that is looked for
LONGEST_PERIOD = 128
# a loop covers at least this many tokens, and at least three rounds
SHORTEST_LOOP = 32


def looping_tokens(ids: Sequence[int]) -> int:
    """Tokens at the end of a document that repeat one passage of at most 128 tokens, three times or more.

    A loop is what a model that is too sure of itself writes until the limit; it would weigh few experts many times.

    Args:
        ids: token ids.

    Returns:
        The length of the longest such end, and 0 if it is below 32 tokens.
    """
    longest = 0
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 3) + 1):
        repeated = 0
        while repeated + period < len(ids) and ids[-1 - repeated] == ids[-1 - repeated - period]:
            repeated += 1
        # the first round of the passage counts too
        if repeated >= 2 * period:
            longest = max(longest, repeated + period)
    return longest if longest >= SHORTEST_LOOP else 0


def fingerprint(text: str) -> str:
    """Text without differences of case and white space; documents of one fingerprint are duplicates."""
    return " ".join(text.lower().split())
