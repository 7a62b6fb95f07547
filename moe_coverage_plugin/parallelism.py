"""Over how many ranks vLLM can spread a checkpoint by tensor parallelism, and what stands in the way of others.

The rules are those of vLLM 0.26 to 0.33 for models of attention layers, dense MLPs and experts; a model with layers of
other kinds may have more. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEGREE = 16
VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it, whatever the degree, and then splits it evenly."""


@dataclass(frozen=True)
class SplitLayer:
    """A linear layer whose input channels are split evenly among ranks.

    Attributes:
        what: its name in messages, ``dense MLP``.
        channels: input channels before splitting.
        group_size: channels that share a scale and so must stay on one rank; ``None`` where they may part.
    """

    what: str
    channels: int
    group_size: int | None = None

    def obstacle(self, degree: int) -> str | None:
        """Why the layer cannot be split, if so."""
        if self.channels % degree:
            return f"{self.channels} channels of the {self.what} are no multiple of it"
        share = self.channels // degree
        if self.group_size and share % self.group_size:
            return (
                f"{share} channels of the {self.what} on each rank are no multiple of the group size {self.group_size}"
            )
        return None


@dataclass(frozen=True)
class ParallelShape:
    """What of a model decides about its degrees.

    Attributes:
        attention_heads: heads of the queries.
        key_value_heads: heads of keys and values; ``None`` where they are compressed to one latent vector (MLA).
        experts: experts of a layer.
        vocabulary: rows of the embedding.
        layers: every different linear layer that is split by its input. Experts of unequal width count with their
            original one, since vLLM splits that and this plugin then deals whole groups of each expert to ranks.
    """

    attention_heads: int
    key_value_heads: int | None
    experts: int
    vocabulary: int
    layers: tuple[SplitLayer, ...]


def obstacles(shape: ParallelShape, degree: int) -> list[str]:
    """Everything that forbids a degree; empty where it is legal."""
    found = []
    if shape.attention_heads % degree:
        found.append(f"{shape.attention_heads} attention heads are no multiple of it")
    heads = shape.key_value_heads
    # heads are copied to several ranks where there are more ranks than heads
    if heads is not None and heads % degree and degree % heads:
        found.append(f"{heads} key/value heads are neither a multiple nor a divisor of it")
    if shape.experts < degree:
        found.append(f"{shape.experts} experts are fewer")
    padded = shape.vocabulary + -shape.vocabulary % VOCABULARY_PADDING
    if padded % degree:
        found.append(f"{padded} rows of the padded vocabulary are no multiple of it")
    return found + [obstacle for layer in shape.layers if (obstacle := layer.obstacle(degree)) is not None]


def degrees(shape: ParallelShape, limit: int = MAX_DEGREE) -> dict[int, list[str]]:
    """The obstacles of every degree from 1 to ``limit``; legal ones have none."""
    return {degree: obstacles(shape, degree) for degree in range(1, limit + 1)}
