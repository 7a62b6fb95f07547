"""Repacks 4-bit weights, scales and zero points from the layout of checkpoints into that of the kernels.

An expert's rows are padded to whole chunks of 32 in ``w13``, to a multiple of 16 in ``w2``. Rows of ``w13`` are
interleaved: 8 of ``gate_proj``, the same 8 of ``up_proj``, and so on. ``repack_int4`` and ``repack_scales`` describe
what becomes of one matrix; ``packed_weights`` reads the result on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_coverage_plugin.serving.packing import packed_columns, unpack_zero_points
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights

CHUNK = 32
"""Input features that are stored together: 16 in low nibbles, the next 16 in high ones."""

PACKED_ROWS = 8
"""Rows that are stored together, as in the operand of an ``mma`` instruction."""

SCALE_ROWS = 16
"""Rows whose scales are stored together; packed matrices have a multiple of them."""

STORED_ZERO = 8
"""The nibble of the value 0."""


def repack(
    tensors: RaggedWeights, widths_E: Sequence[int], hidden: int, groups: int, groups_E: Sequence[int]
) -> RaggedWeights:
    """Repack all tensors of a layer except for biases.

    Weights and scales are overwritten. The result shares their memory unless a matrix has to be padded.

    Args:
        tensors: packed weights as loaded.
        widths_E: channels of each expert.
        hidden: hidden size.
        groups: quantization groups along the input features of ``w13``.
        groups_E: quantization groups along the input features of each expert's ``w2``.
    """
    w13, w2, w13_scale, w2_scale, _, _, w13_zero_point, w2_zero_point = tensors
    assert w13_scale is not None
    assert w2_scale is not None
    if w13_zero_point is not None and w2_zero_point is not None:
        w13_zeros = _unpack_zeros(w13_zero_point, [(2 * width, groups) for width in widths_E], matrices=2)
        w2_zeros = _unpack_zeros(w2_zero_point, [(hidden, of_expert) for of_expert in groups_E])
        w13_zero_point = _repack_w13_scales(w13_zeros.to(w13_scale.dtype), widths_E, groups)
        w2_zero_point = _repack_w2_scales(w2_zeros.to(w2_scale.dtype), hidden, groups_E)
    return tensors._replace(
        w13=_repack_w13(w13, widths_E, hidden),
        w13_scale=_repack_w13_scales(w13_scale, widths_E, groups),
        w2=_repack_w2(w2, widths_E, hidden),
        w2_scale=_repack_w2_scales(w2_scale, hidden, groups_E),
        w13_zero_point=w13_zero_point,
        w2_zero_point=w2_zero_point,
    )


def repack_int4(words: Tensor, columns: int) -> Tensor:
    """Reorder packed words into the order in which the threads of a warp need them.

    A chunk of a packed row, 8 rows by ``CHUNK`` columns, has 16 bytes for each row, four for each of the four threads
    that hold this row of the left operand of an ``mma`` instruction. Byte ``4 t + 2 h + i`` holds column
    ``8 h + 2 t + i`` of the chunk in its low nibble, and the column 16 further in its high nibble.

    Args:
        words: int32 ``[rows, words]``, eight values plus 8 each, the first column in the lowest nibble.
        columns: values per row; the rest of the last word is not read.

    Returns:
        uint8 ``[packed rows, chunks, 8, 16]``; rows and columns of padding hold zeros, which are stored as 8.
    """
    rows = len(words)
    bytes_ = words.contiguous().view(torch.uint8)
    values = torch.stack((bytes_ & 0xF, bytes_ >> 4), dim=-1).view(rows, -1)[:, :columns]
    values = pad(values, (0, -columns % CHUNK, 0, -rows % SCALE_ROWS), value=STORED_ZERO)
    # packed row, row, chunk, low or high, half h, thread t, column i of a pair
    parts = values.view(-1, PACKED_ROWS, values.shape[1] // CHUNK, 2, 2, 4, 2).permute(0, 2, 1, 3, 5, 4, 6)
    low, high = parts.unbind(3)
    return (low | (high << 4)).reshape(*parts.shape[:3], 16)


def repack_scales(scale: Tensor) -> Tensor:
    """Reorder scales ``[rows, groups]`` into ``[groups, rows]``, those of rows 8 apart next to each other.

    A thread needs both and loads them as one word if they have 16 bits.
    """
    rows, groups = scale.shape
    parts = scale.t().reshape(groups, rows // SCALE_ROWS, 2, PACKED_ROWS)
    return parts.transpose(2, 3).reshape(groups, rows)


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def _repack_w13(words: Tensor, widths_E: Sequence[int], hidden: int) -> Tensor:
    columns = packed_columns(hidden)
    parts = words.split([2 * width * columns for width in widths_E])
    repacked = (
        repack_int4(_interleave(part.view(2 * width, columns), width), hidden)
        for part, width in zip(parts, widths_E, strict=True)
        if width
    )
    rows = 2 * sum(round_up(width, CHUNK) for width in widths_E)
    return _fill(words.view(torch.uint8), rows * round_up(hidden, CHUNK) // 2, repacked)


def _repack_w13_scales(scale: Tensor, widths_E: Sequence[int], groups: int) -> Tensor:
    """Scales or zero points of ``w13``."""
    parts = scale.split([2 * width * groups for width in widths_E])
    repacked = (
        repack_scales(_interleave(part.view(2 * width, groups), width))
        for part, width in zip(parts, widths_E, strict=True)
        if width
    )
    return _fill(scale, 2 * sum(round_up(width, CHUNK) for width in widths_E) * groups, repacked)


def _repack_w2(words: Tensor, widths_E: Sequence[int], hidden: int) -> Tensor:
    parts = words.split([hidden * packed_columns(width) for width in widths_E])
    repacked = (
        repack_int4(part.view(hidden, -1), width) for part, width in zip(parts, widths_E, strict=True) if width
    )
    columns = sum(round_up(width, CHUNK) for width in widths_E)
    return _fill(words.view(torch.uint8), round_up(hidden, SCALE_ROWS) * columns // 2, repacked)


def _repack_w2_scales(scale: Tensor, hidden: int, groups_E: Sequence[int]) -> Tensor:
    """Scales or zero points of ``w2``."""
    parts = scale.split([hidden * groups for groups in groups_E])
    repacked = (
        repack_scales(pad(part.view(hidden, groups), (0, 0, 0, -hidden % SCALE_ROWS)))
        for part, groups in zip(parts, groups_E, strict=True)
        if groups
    )
    return _fill(scale, round_up(hidden, SCALE_ROWS) * sum(groups_E), repacked)


def _interleave(matrix: Tensor, width: int) -> Tensor:
    """Rows of ``w13`` in turn, 8 of gate and 8 of up, padded by zeros to whole chunks of channels."""
    columns = matrix.shape[1]
    padded = pad(matrix.view(2, width, columns), (0, 0, 0, -width % CHUNK))
    return padded.view(2, -1, PACKED_ROWS, columns).transpose(0, 1).reshape(-1, columns)


def _unpack_zeros(words: Tensor, shapes_E: Sequence[tuple[int, int]], matrices: int = 1) -> Tensor:
    """Flat int8 zero points, one per scale.

    Args:
        words: flat int32 words of all experts.
        shapes_E: rows and groups of each expert.
        matrices: as for ``unpack_zero_points``.
    """
    words_E = [matrices * packed_columns(rows // matrices) for rows, _ in shapes_E]
    parts = words.split([count * groups for count, (_, groups) in zip(words_E, shapes_E, strict=True)])
    unpacked = (
        unpack_zero_points(part.view(count, groups), rows, matrices).flatten()
        for part, count, (rows, groups) in zip(parts, words_E, shapes_E, strict=True)
        if part.numel()
    )
    return torch.cat([words.new_empty(0, dtype=torch.int8), *unpacked])


def _fill(flat: Tensor, size: int, parts: Iterable[Tensor]) -> Tensor:
    """Write parts end to end into ``flat`` if it has the right size, else into new memory.

    ``parts`` is lazy: each is computed from ``flat`` just before the same region is overwritten.
    """
    filled = flat if flat.numel() == size else flat.new_empty(size)
    stop = 0
    for part in parts:
        start, stop = stop, stop + part.numel()
        filled[start:stop] = part.reshape(-1)
    assert stop == size
    return filled
