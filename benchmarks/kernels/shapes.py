"""Layers of known models, and the widths and bytes of their experts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 128
"""Alignment of widths, in channels."""

GROUP_SIZE = 128
"""Input features per scale of 4-bit weights."""

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192)


@dataclass(frozen=True)
class Shape:
    """The experts of one layer.

    Attributes:
        name: of the model.
        hidden: hidden size.
        channels: channels of an unpruned expert.
        experts: number of experts.
        top_k: experts per token.
    """

    name: str
    hidden: int
    channels: int
    experts: int
    top_k: int

    @property
    def width(self) -> int:
        """Mean width: 5/6 of the channels, rounded to blocks, so that a layer of this one width exists."""
        return BLOCK * max(1, round(self.channels * 5 / 6 / BLOCK))


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("Qwen1.5-MoE-A2.7B", 2048, 1408, 60, 4),
    Shape("DeepSeek-V2-Lite", 2048, 1408, 64, 6),
    Shape("Mixtral-8x7B", 4096, 14336, 8, 2),
    Shape("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    Shape("DeepSeek-V3", 7168, 2048, 256, 8),
)


def random_widths(shape: Shape, seed: int) -> list[int]:
    """Random widths whose mean is exactly ``shape.width``.

    About half of the experts have this width, a quarter are wider by a step, and a quarter narrower. The step is a
    fifth of the width, rounded down to blocks, but at least one block and at most what unpruned experts have. A coin
    decides for each pair of experts whether one is wider and the other narrower.
    """
    generator = random.Random(seed)
    mean, most = shape.width // BLOCK, shape.channels // BLOCK
    step = min(max(1, mean // 5), most - mean, mean - 1)
    blocks = [mean] * (shape.experts % 2)
    for _ in range(shape.experts // 2):
        difference = generator.choice((0, step))
        blocks += [mean - difference, mean + difference]
    generator.shuffle(blocks)
    return [BLOCK * count for count in blocks]


def expert_bytes(width: int, hidden: int, bits: int) -> int:
    """Bytes of an expert's weights, including 16-bit scales."""
    weights = 3 * width * hidden
    if bits == 16:
        return 2 * weights
    if bits == 8:
        return weights + 2 * (2 * width + hidden)
    return weights // 2 + 2 * (weights // GROUP_SIZE)


def copies_needed(touched: float, cache: int) -> int:
    """Copies of the weights to use in turn, so that each is read again only after four times the L2 cache.

    Args:
        touched: bytes of weights that a call reads.
        cache: bytes of the L2 cache.
    """
    return math.ceil(4 * cache / touched)


def mean_bytes(hit: Sequence[Sequence[int]], widths_E: Sequence[int], hidden: int, bits: int) -> float:
    """Bytes of weights that a call must read, the mean over calls.

    Args:
        hit: the experts of each call that get a token, without repetition.
        widths_E: channels of each expert.
        hidden: hidden size.
        bits: bits of a weight.
    """
    bytes_E = [expert_bytes(width, hidden, bits) for width in widths_E]
    return sum(bytes_E[expert] for experts in hit for expert in experts) / len(hit)
