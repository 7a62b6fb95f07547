"""Expert weights as the kernels read them, made once from the flat tensors that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_coverage_plugin.serving.packing import packed_columns, unpack_zero_points

CHUNK = 32
"""Input channels of packed weights that lie together: 16 in low nibbles, the next 16 in high ones."""

ROWS = 8
"""Rows of packed weights that lie together, as in a matrix instruction's operand."""

SCALE_ROWS = 16
"""Rows whose scales lie together; packed matrices have a multiple of them."""

ZERO_NIBBLE = 8
MAX_UNIT, BYTES_OF_UNIT = 128, 16
MIN_CAPABILITY = (8, 0)
"""The first with bfloat16 and asynchronous copies."""

MIN_CAPABILITY_FLOAT8 = (8, 9)


@dataclass(frozen=True)
class KernelWeights:
    """Weights of a layer's experts and the table that says where each expert's begin.

    Experts lie end to end. Widths are padded to whole units of ``unit`` channels where that is said.

    Plain weights: ``w13`` is ``[2 N, H]``, gate rows above up rows; ``w2`` is ``[H, N padded]``. Those of 8 bits have
    a scale for each row, ``[2 N]`` and, where an expert has channels, ``[H]``.

    Packed weights: uint8 in the order of ``repack_int4``; scales ``[groups, rows]`` in the order of ``repack_scales``,
    and so are zero points, in the type of scales.
    ``w13`` has ``2 N padded`` rows, eight of the gate, the same eight of up, and so on; ``w2`` has ``H`` rows padded
    to whole sixteens.

    Attributes:
        w13, w2: flat.
        w13_scale, w2_scale: flat, of packed and of 8-bit weights.
        w13_bias, w2_bias: flat, ``[2 N]`` and ``[H]`` each, not padded; a removed expert has a down bias.
        w13_zero_point, w2_zero_point: flat, of packed weights that are asymmetric.
        table_E4: int64 rows of width, first channel, first unit, first scale group of ``w2``.
        hidden: hidden size ``H``.
        width: the largest width.
        bits: 4 for packed weights, 8 for 8-bit floats, 16 for plain weights of any other floating dtype.
        group_size: input channels per scale, 0 for one scale per row.
        unit: a power of two; 128 where all widths are multiples of it.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    w13_zero_point: Tensor | None
    w2_zero_point: Tensor | None
    table_E4: Tensor
    hidden: int
    width: int
    bits: int
    group_size: int
    unit: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights, scales, biases and zero points in the order in which ``prepare`` takes them."""
        scales, biases = (self.w13_scale, self.w2_scale), (self.w13_bias, self.w2_bias)
        return self.w13, self.w2, *scales, *biases, self.w13_zero_point, self.w2_zero_point

    @property
    def computed_in(self) -> torch.dtype | None:
        """Dtype of hidden states: that of plain weights or of packed weights' scales, any for 8 bits."""
        decisive = {16: self.w13, 8: None, 4: self.w13_scale}[self.bits]
        return None if decisive is None else decisive.dtype

    @property
    def experts(self) -> int:
        """Number of experts, removed ones included."""
        return len(self.table_E4)

    @property
    def w2_weights(self) -> int:
        """Weights of all second projections together, padding included."""
        return self.w2.numel() * (2 if self.bits == 4 else 1)

    @property
    def min_width(self) -> int:
        """Least width at which an expert has something to add: with biases, one of width 0 adds its down bias."""
        return 1 if self.w2_bias is None else 0

    @property
    def padded_width(self) -> int:
        """The largest width in whole units."""
        return _whole(self.width, self.unit)


def refusal(
    widths_E: Sequence[int], hidden: int, group_size: int | None, capability: tuple[int, int], bits: int = 16
) -> str | None:
    """Why the kernels cannot run these experts, ``None`` if they can.

    Args:
        widths_E: channels of each expert.
        hidden: hidden size.
        group_size: input channels per scale, ``None`` without scales or with one per row.
        capability: of the card.
        bits: of weights, see ``KernelWeights``.
    """
    least = MIN_CAPABILITY_FLOAT8 if bits == 8 else MIN_CAPABILITY
    if capability < least:
        needed, found = (".".join(map(str, version)) for version in (least, capability))
        of_bits = " for 8-bit floats" if bits == 8 else ""
        return f"the kernels need compute capability {needed}{of_bits}, the card has {found}"
    if bits == 8 and hidden % BYTES_OF_UNIT:
        return f"hidden size {hidden} is no multiple of {BYTES_OF_UNIT}, which 8-bit floats need"
    if group_size and group_size % CHUNK:
        return f"group size {group_size} is no multiple of {CHUNK}"
    if 2 * max(widths_E) * hidden >= 2**31:
        return f"an expert of {max(widths_E)} channels of {hidden} needs 64-bit offsets inside a matrix"
    return None


def prepare(
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_zero_point: Tensor | None = None,
    w2_zero_point: Tensor | None = None,
    *,
    widths_E: Sequence[int],
    hidden: int,
    group_size: int | None,
) -> KernelWeights:
    """Bring the flat tensors of ``ExpertShapes`` into the layout of the kernels.

    Packed weights and scales are **overwritten**; the result shares their memory wherever nothing must be padded, so
    this may be called once for each time that they were loaded. Plain weights are taken as they are, save ``w2`` where
    rows of a width are not whole sixteens of bytes, which is copied with padded rows.

    Args:
        w13, w2: plain weights in the dtype of the hidden states or in ``float8_e4m3fn``, or int32 words.
        w13_scale, w2_scale: scales of packed weights and of 8-bit ones.
        w13_bias, w2_bias: biases, where there are any.
        w13_zero_point, w2_zero_point: zero points of packed weights that are asymmetric, int32 words. They grow to the
            type of scales, a small part of the weights.
        widths_E: channels of each expert on this rank.
        hidden: hidden size.
        group_size: input channels per scale, ``None`` for one scale per row and for plain weights.
    """
    assert not group_size or group_size % CHUNK == 0
    packed = w13.dtype == torch.int32
    unit = CHUNK if packed else _common_unit(widths_E, BYTES_OF_UNIT // min(w13.itemsize, 2))
    units_E = [-(-width // unit) for width in widths_E]
    groups_E = [_groups(width, group_size) for width in widths_E]
    if packed:
        assert w13_scale is not None
        assert w2_scale is not None
        groups = _groups(hidden, group_size)
        if w13_zero_point is not None and w2_zero_point is not None:
            w13_zeros = _zeros(w13_zero_point, [(2 * width, groups) for width in widths_E], matrices=2)
            w2_zeros = _zeros(w2_zero_point, [(hidden, of_expert) for of_expert in groups_E])
            w13_zero_point = _repack_gate_up_scales(w13_zeros.to(w13_scale.dtype), widths_E, groups)
            w2_zero_point = _repack_down_scales(w2_zeros.to(w2_scale.dtype), hidden, groups_E)
        w13, w13_scale = _repack_gate_up(w13, widths_E, hidden), _repack_gate_up_scales(w13_scale, widths_E, groups)
        w2, w2_scale = _repack_down(w2, widths_E, hidden), _repack_down_scales(w2_scale, hidden, groups_E)
    elif any(width % unit for width in widths_E):
        parts = w2.split([hidden * width for width in widths_E])
        matrices = (part.view(hidden, width) for part, width in zip(parts, widths_E, strict=True))
        padded_E = [unit * units for units in units_E]
        w2 = torch.cat([pad(w, (0, n - w.shape[1])).flatten() for w, n in zip(matrices, padded_E, strict=True)])
    table = zip(widths_E, _starts(widths_E), _starts(units_E), _starts(groups_E), strict=True)
    return KernelWeights(
        *(w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, w13_zero_point, w2_zero_point),
        table_E4=torch.tensor(list(table), dtype=torch.int64).to(w13.device),
        hidden=hidden,
        width=max(widths_E),
        bits=4 if packed else 8 if w13.itemsize == 1 else 16,
        group_size=group_size or 0,
        unit=unit,
    )


def repack_int4(words: Tensor, columns: int) -> Tensor:
    """Packed words in the order in which the threads of a warp need them.

    In blocks of 8 rows and ``CHUNK`` columns lie 16 bytes for each row, four for each of the four threads that hold
    this row of a matrix instruction's left operand. Byte ``4 t + 2 h + i`` holds column ``8 h + 2 t + i`` in its low
    nibble and the column 16 further in its high nibble.

    Args:
        words: int32 ``[rows, words]``, eight values plus 8 each, the first column in the lowest nibble.
        columns: values per row; the rest of the last word is not read.

    Returns:
        uint8 ``[blocks, chunks, 8, 16]``; missing rows and columns are filled with zeros, which are stored as 8.
    """
    rows = len(words)
    bytes_ = words.contiguous().view(torch.uint8)
    values = torch.stack((bytes_ & 0xF, bytes_ >> 4), dim=-1).view(rows, -1)[:, :columns]
    values = pad(values, (0, -columns % CHUNK, 0, -rows % SCALE_ROWS), value=ZERO_NIBBLE)
    # block, row, chunk, low or high, half h, thread t, pair i
    parts = values.view(-1, ROWS, values.shape[1] // CHUNK, 2, 2, 4, 2).permute(0, 2, 1, 3, 5, 4, 6)
    low, high = parts.unbind(3)
    return (low | (high << 4)).reshape(*parts.shape[:3], 16)


def repack_scales(scale: Tensor) -> Tensor:
    """Scales ``[rows, groups]`` as ``[groups, rows]``, in sixteen rows each one beside that of the eighth row after.

    A thread needs both, and reads them as one word where they have 16 bits.
    """
    rows, groups = scale.shape
    return scale.t().reshape(groups, rows // SCALE_ROWS, 2, ROWS).transpose(2, 3).reshape(groups, rows)


def _repack_gate_up(words: Tensor, widths_E: Sequence[int], hidden: int) -> Tensor:
    """``w13``."""
    columns = -(-hidden // 8)
    parts = words.split([2 * width * columns for width in widths_E])
    repacked = (
        repack_int4(_interleaved(part.view(2 * width, columns), width), hidden)
        for part, width in zip(parts, widths_E, strict=True)
        if width
    )
    rows = 2 * sum(_whole(width, CHUNK) for width in widths_E)
    return _fill(words.view(torch.uint8), rows * _whole(hidden, CHUNK) // 2, repacked)


def _repack_gate_up_scales(scale: Tensor, widths_E: Sequence[int], groups: int) -> Tensor:
    """Scales of ``w13``, or its zero points."""
    parts = scale.split([2 * width * groups for width in widths_E])
    repacked = (
        repack_scales(_interleaved(part.view(2 * width, groups), width))
        for part, width in zip(parts, widths_E, strict=True)
        if width
    )
    return _fill(scale, 2 * sum(_whole(width, CHUNK) for width in widths_E) * groups, repacked)


def _repack_down(words: Tensor, widths_E: Sequence[int], hidden: int) -> Tensor:
    """``w2``."""
    parts = words.split([hidden * -(-width // 8) for width in widths_E])
    repacked = (
        repack_int4(part.view(hidden, -1), width) for part, width in zip(parts, widths_E, strict=True) if width
    )
    columns = sum(_whole(width, CHUNK) for width in widths_E)
    return _fill(words.view(torch.uint8), _whole(hidden, SCALE_ROWS) * columns // 2, repacked)


def _repack_down_scales(scale: Tensor, hidden: int, groups_E: Sequence[int]) -> Tensor:
    """Scales of ``w2``, or its zero points."""
    parts = scale.split([hidden * groups for groups in groups_E])
    repacked = (
        repack_scales(pad(part.view(hidden, groups), (0, 0, 0, -hidden % SCALE_ROWS)))
        for part, groups in zip(parts, groups_E, strict=True)
        if groups
    )
    return _fill(scale, _whole(hidden, SCALE_ROWS) * sum(groups_E), repacked)


def _interleaved(matrix: Tensor, width: int) -> Tensor:
    """Rows of ``w13`` in eights of gate and up, missing ones zero."""
    columns = matrix.shape[1]
    padded = pad(matrix.view(2, width, columns), (0, 0, 0, -width % CHUNK))
    return padded.view(2, -1, ROWS, columns).transpose(0, 1).reshape(-1, columns)


def _zeros(words: Tensor, shapes_E: Sequence[tuple[int, int]], matrices: int = 1) -> Tensor:
    """Zero points, flat, one for each scale of experts with such rows and groups; see ``unpack_zero_points``."""
    words_E = [matrices * packed_columns(rows // matrices) for rows, _ in shapes_E]
    parts = words.split([count * groups for count, (_, groups) in zip(words_E, shapes_E, strict=True)])
    unpacked = (
        unpack_zero_points(part.view(count, groups), rows, matrices).flatten()
        for part, count, (rows, groups) in zip(parts, words_E, shapes_E, strict=True)
        if part.numel()
    )
    return torch.cat([words.new_empty(0, dtype=torch.int8), *unpacked])


def _fill(flat: Tensor, size: int, parts: Iterable[Tensor]) -> Tensor:
    """Parts end to end, in the memory that they come from if they fit: each is made before its place is written."""
    filled = flat if flat.numel() == size else flat.new_empty(size)
    stop = 0
    for part in parts:
        start, stop = stop, stop + part.numel()
        filled[start:stop] = part.reshape(-1)
    assert stop == size
    return filled


def _groups(channels: int, group_size: int | None) -> int:
    """Scales per row; a matrix without columns has none."""
    return -(-channels // (group_size or channels)) if channels else 0


def _common_unit(widths_E: Sequence[int], least: int) -> int:
    unit = MAX_UNIT
    while unit > least and any(width % unit for width in widths_E):
        unit //= 2
    return unit


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
