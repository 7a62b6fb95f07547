"""The table of a layer's experts: how wide each expert is and where its tensors begin in the flat ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class TableRow(NamedTuple):
    """One expert's row of ``table_E4``.

    Attributes:
        width: kept channels of the expert on this rank, 0 for a removed expert.
        first_channel: channels of all experts before it, without padding.
        first_unit: units of all experts before it; an expert has its width in units, rounded up.
        first_group: quantization groups along the input features of ``w2`` of all experts before it.
    """

    width: int
    first_channel: int
    first_unit: int
    first_group: int


COLUMNS = tl.constexpr(len(TableRow._fields))
WIDTH = tl.constexpr(TableRow._fields.index("width"))
FIRST_CHANNEL = tl.constexpr(TableRow._fields.index("first_channel"))
FIRST_UNIT = tl.constexpr(TableRow._fields.index("first_unit"))
FIRST_GROUP = tl.constexpr(TableRow._fields.index("first_group"))


def make_table(widths_E: Sequence[int], units_E: Sequence[int], groups_E: Sequence[int]) -> Tensor:
    """``table_E4``, int64, a ``TableRow`` for each expert.

    Args:
        widths_E: channels of each expert.
        units_E: units that each expert takes.
        groups_E: quantization groups along the input features of each expert's ``w2``.
    """
    rows = zip(widths_E, _starts(widths_E), _starts(units_E), _starts(groups_E), strict=True)
    return torch.tensor([TableRow(*row) for row in rows], dtype=torch.int64)


@triton.jit
def known_expert(expert, NUM_EXPERTS: tl.constexpr):
    """Numbers of experts as int64, -1 for each number from ``NUM_EXPERTS`` on: the table has no row for it."""
    expert = expert.to(tl.int64)
    return tl.where(expert < NUM_EXPERTS, expert, -1)


@triton.jit
def load_column(table_ptr, expert, COLUMN: tl.constexpr):
    """One column of the rows of ``expert``, a scalar or a tensor, which must exist."""
    return tl.load(table_ptr + expert * COLUMNS + COLUMN)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
