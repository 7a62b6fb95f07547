"""What draws continuations from a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Engine(Protocol):
    """Draws one continuation for each prompt."""

    def __call__(self, prompts: Sequence[list[int]], stops: frozenset[int], length: int, seed: int) -> list[list[int]]:
        """Draw.

        Args:
            prompts: token ids.
            stops: token ids after which a continuation ends.
            length: most tokens of a prompt and its continuation.
            seed: seed of the draws.

        Returns:
            The continuations, each with the token that ended it.
        """
        ...


def up_to_stop(ids: list[int], stops: frozenset[int]) -> list[int]:
    """Token ids up to the first that ends a document, with it."""
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[: end + 1]
