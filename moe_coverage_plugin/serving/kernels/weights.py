"""Expert weights in the layout of the kernels, prepared once from the flat tensors that are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_coverage_plugin.serving.kernels.expert_table import make_table
from moe_coverage_plugin.serving.kernels.repacking import CHUNK, repack, round_up
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights

MAX_UNIT = 128
"""The largest unit, in channels."""

ROW_ALIGNMENT = 16
"""Bytes of whose multiples rows of a plain ``w2`` consist, so that they can be loaded as vectors."""

MIN_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16 and asynchronous copies."""

MIN_CAPABILITY_FLOAT8 = (8, 9)
"""The first compute capability with dot products of 8-bit floats."""


@dataclass(frozen=True)
class KernelWeights:
    """Weights of a layer's experts, and the table that says where each expert begins.

    The matrices of the experts are end to end in each flat tensor. With widths ``N`` and hidden size ``H``:

    - Plain weights (16 or 8 bits): ``w13`` is ``[2 N, H]``, gate rows above up rows; ``w2`` is ``[H, N]`` with ``N``
      padded to a multiple of ``unit``. Those of 8 bits have one scale per row: ``[2 N]``, and ``[H]`` unless the
      expert is empty.
    - Packed weights (4 bits): uint8 in the order of ``repack_int4``. ``w13`` has ``2 N`` rows with ``N`` padded to a
      multiple of ``unit``, 8 of gate, the same 8 of up, and so on; ``w2`` has ``H`` rows, padded to a multiple of 16.
      Scales are ``[groups, rows]`` in the order of ``repack_scales``; so are zero points, in the dtype of the scales.
    - Biases: ``[2 N]`` and ``[H]``, not padded. A removed expert has a down bias, which is zero.

    Attributes:
        tensors: in this layout.
        table_E4: int64, a ``TableRow`` for each expert.
        hidden: hidden size ``H``.
        max_width: width of the widest expert.
        bits: 4 for packed weights, 8 for 8-bit floats, 16 for plain weights of any other floating dtype.
        group_size: input features per scale, 0 for one scale per row.
        unit: channels to whose multiple widths are padded, a power of two; 128 if all widths are multiples of it.
    """

    tensors: RaggedWeights
    table_E4: Tensor
    hidden: int
    max_width: int
    bits: int
    group_size: int
    unit: int

    @property
    def hidden_dtype(self) -> torch.dtype | None:
        """The dtype that hidden states must have, ``None`` if any will do."""
        decisive = {16: self.tensors.w13, 8: None, 4: self.tensors.w13_scale}[self.bits]
        return None if decisive is None else decisive.dtype

    @property
    def experts(self) -> int:
        """Number of experts, removed ones included."""
        # len() of a tensor takes 1.5 µs, and this is read at every call
        return self.table_E4.shape[0]

    @property
    def w2_numel(self) -> int:
        """Weights of all experts' ``w2``, padding included."""
        return self.tensors.w2.numel() * (2 if self.bits == 4 else 1)

    @property
    def min_width(self) -> int:
        """Least width of experts that are computed: 1, or 0 with biases, as an empty expert outputs its down bias."""
        return 1 if self.tensors.w2_bias is None else 0

    @property
    def max_padded_width(self) -> int:
        """Width of the widest expert, padded to a multiple of ``unit``."""
        return round_up(self.max_width, self.unit)


def unsupported_reason(
    widths_E: Sequence[int], hidden: int, group_size: int | None, capability: tuple[int, int], bits: int = 16
) -> str | None:
    """Why the kernels cannot run these experts, ``None`` if they can.

    Args:
        widths_E: channels of each expert.
        hidden: hidden size.
        group_size: input features per scale, ``None`` without scales or with one per row.
        capability: compute capability of the card.
        bits: see ``KernelWeights``.
    """
    least = MIN_CAPABILITY_FLOAT8 if bits == 8 else MIN_CAPABILITY
    if capability < least:
        needed, found = (".".join(map(str, version)) for version in (least, capability))
        of_bits = " for 8-bit floats" if bits == 8 else ""
        return f"the kernels need compute capability {needed}{of_bits}, the card has {found}"
    if bits == 8 and hidden % ROW_ALIGNMENT:
        return f"hidden size {hidden} is not a multiple of {ROW_ALIGNMENT}, which 8-bit floats need"
    if group_size and group_size % CHUNK:
        return f"group size {group_size} is not a multiple of {CHUNK}"
    if 2 * max(widths_E) * hidden >= 2**31:
        return f"an expert of {max(widths_E)} channels of {hidden} needs 64-bit offsets inside a matrix"
    return None


def prepare(tensors: RaggedWeights, *, widths_E: Sequence[int], hidden: int, group_size: int | None) -> KernelWeights:
    """Bring loaded tensors into the layout of the kernels.

    Packed weights and scales are **overwritten**: call this once after each load. The result shares their memory
    unless a matrix has to be padded. Plain weights are used unchanged, except that ``w2`` is copied with padded rows
    if the rows of some expert are not a multiple of 16 bytes. Zero points are converted from int32 words to the dtype
    of the scales, which takes little memory compared to the weights.

    Args:
        tensors: in the layout of ``ExpertShapes``. Plain weights have the dtype of the hidden states or
            ``float8_e4m3fn``; packed weights and zero points are int32 words.
        widths_E: channels of each expert on this rank.
        hidden: hidden size.
        group_size: input features per scale, ``None`` for one scale per row and for plain weights.
    """
    assert not group_size or group_size % CHUNK == 0
    packed = tensors.w13.dtype == torch.int32
    unit = CHUNK if packed else _common_unit(widths_E, ROW_ALIGNMENT // min(tensors.w13.itemsize, 2))
    groups_E = [_groups(width, group_size) for width in widths_E]
    if packed:
        tensors = repack(tensors, widths_E, hidden, _groups(hidden, group_size), groups_E)
    elif any(width % unit for width in widths_E):
        tensors = tensors._replace(w2=_pad_columns(tensors.w2, widths_E, hidden, unit))
    return KernelWeights(
        tensors,
        table_E4=make_table(widths_E, [-(-width // unit) for width in widths_E], groups_E).to(tensors.w13.device),
        hidden=hidden,
        max_width=max(widths_E),
        bits=4 if packed else 8 if tensors.w13.itemsize == 1 else 16,
        group_size=group_size or 0,
        unit=unit,
    )


def _pad_columns(w2: Tensor, widths_E: Sequence[int], hidden: int, unit: int) -> Tensor:
    parts = w2.split([hidden * width for width in widths_E])
    matrices = (part.view(hidden, width) for part, width in zip(parts, widths_E, strict=True))
    return torch.cat([pad(matrix, (0, -matrix.shape[1] % unit)).flatten() for matrix in matrices])


def _groups(in_features: int, group_size: int | None) -> int:
    """Scales per row; a matrix without columns has none."""
    return -(-in_features // (group_size or in_features)) if in_features else 0


def _common_unit(widths_E: Sequence[int], least: int) -> int:
    """The largest power of two up to ``MAX_UNIT`` that divides all widths, but at least ``least``."""
    unit = MAX_UNIT
    while unit > least and any(width % unit for width in widths_E):
        unit //= 2
    return unit
