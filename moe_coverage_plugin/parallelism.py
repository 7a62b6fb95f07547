"""The tensor-parallel degrees at which vLLM can serve a checkpoint, and what forbids the others.

The rules are those of vLLM 0.26 to 0.33 for models of attention layers, dense MLPs and experts; a model with layers of
other kinds may have more rules. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_DEGREE = 16
VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it at every degree, and then splits it evenly."""


@dataclass(frozen=True)
class SplitLayer:
    """A linear layer whose input channels are split evenly among ranks.

    Attributes:
        what: its name in messages, ``dense MLP``.
        channels: input channels before splitting.
        group_size: channels that share a scale or a packed word and so must stay on one rank; ``None`` if there
            are no such channels.
        unit: what has ``group_size`` channels, in messages.
        of_experts: whether it is a layer of routed experts, which expert parallelism does not split.
    """

    what: str
    channels: int
    group_size: int | None = None
    unit: str = "group size"
    of_experts: bool = False

    def obstacle(self, degree: int) -> str | None:
        """Return why the layer cannot be split, or ``None`` if it can."""
        if self.channels % degree:
            return f"{self.channels} channels of the {self.what} are not a multiple of it"
        share = self.channels // degree
        if self.group_size and share % self.group_size:
            return (
                f"{share} channels of the {self.what} on each rank are not a multiple of the {self.unit} "
                f"{self.group_size}"
            )
        return None


@dataclass(frozen=True)
class ParallelShape:
    """The sizes of a model that decide its degrees.

    Attributes:
        attention_heads: heads of the queries.
        key_value_heads: heads of keys and values; ``None`` if they are compressed to one latent vector (MLA).
        experts: experts of a layer.
        vocabulary: rows of the embedding.
        layers: the linear layers that are split by input channels, one for each combination of name, channels and
            group size. Experts of unequal width are not among them: this plugin assigns whole groups of each expert to
            any number of ranks.
    """

    attention_heads: int
    key_value_heads: int | None
    experts: int
    vocabulary: int
    layers: tuple[SplitLayer, ...]


def obstacles(shape: ParallelShape, degree: int, expert_parallel: bool = False) -> list[str]:
    """Return everything that forbids a degree; empty if it is legal.

    Args:
        shape: sizes of the model.
        degree: number of tensor-parallel ranks.
        expert_parallel: whether each rank holds entire experts instead of a part of each.
    """
    found = []
    if shape.attention_heads % degree:
        found.append(f"{shape.attention_heads} attention heads are not a multiple of it")
    if shape.key_value_heads is not None and (obstacle := heads_obstacle(shape.key_value_heads, degree)) is not None:
        found.append(obstacle)
    if shape.experts < degree:
        found.append(f"{shape.experts} experts are fewer")
    padded = shape.vocabulary + -shape.vocabulary % VOCABULARY_PADDING
    if padded % degree:
        found.append(f"{padded} rows of the padded vocabulary are not a multiple of it")
    for layer in shape.layers:
        obstacle = layer.obstacle(1 if expert_parallel and layer.of_experts else degree)
        if obstacle is not None:
            found.append(obstacle)
    return found


def heads_obstacle(heads: int, degree: int) -> str | None:
    """Return why key/value heads cannot be split, or ``None``; vLLM copies them if there are more ranks than heads."""
    if heads % degree and degree % heads:
        return f"{heads} key/value heads are neither a multiple nor a divisor of it"
    return None


def degrees(shape: ParallelShape, limit: int = MAX_DEGREE, expert_parallel: bool = False) -> dict[int, list[str]]:
    """Return the obstacles of every degree from 1 to ``limit``; legal degrees have none."""
    return {degree: obstacles(shape, degree, expert_parallel) for degree in range(1, limit + 1)}


def rank_ranges(widths_E: Sequence[int], unit: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the channels ``[start, stop)`` of every expert of a layer that a tensor-parallel rank holds.

    Units (quantization groups; a last partial unit counts as one) are assigned contiguously in rank order, so the
    ranges of all ranks partition ``[0, width)`` and no group is cut. Units of an expert that do not divide evenly are
    assigned one each to the ranks after the rank that received the last such unit. So over all experts of a layer, no
    rank holds more than one unit more than another. A rank may hold no channel of an expert.

    Args:
        widths_E: stored channels of each expert.
        unit: channels that must stay on one rank, :attr:`ExpertScheme.shard_unit`.
        rank: number of the rank, from 0.
        world_size: number of ranks.
    """
    assert unit >= 1
    assert 0 <= rank < world_size
    ranges, next_rank = [], 0
    for width in widths_E:
        assert width >= 0
        units_each, extra = divmod(-(-width // unit), world_size)
        # the number of ranks with an extra unit, up to this rank without it and including it
        before, with_it = (
            sum((earlier - next_rank) % world_size < extra for earlier in range(ranks)) for ranks in (rank, rank + 1)
        )
        start, stop = rank * units_each + before, (rank + 1) * units_each + with_it
        ranges.append((min(start * unit, width), min(stop * unit, width)))
        next_rank = (next_rank + extra) % world_size
    return ranges


def imbalance(layers: Iterable[Sequence[int]], unit: int, world_size: int) -> float:
    """Return by what fraction the fullest rank holds more expert channels than the average rank, over all layers.

    Args:
        layers: widths of the experts of each layer.
        unit: channels that must stay on one rank, as in :func:`rank_ranges`.
        world_size: number of ranks.
    """
    loads = [0] * world_size
    for widths_E in layers:
        for rank in range(world_size):
            loads[rank] += sum(stop - start for start, stop in rank_ranges(widths_E, unit, rank, world_size))
    return max(loads) * world_size / sum(loads) - 1 if sum(loads) else 0.0
