"""4-bit weights as compressed-tensors stores them (``pack-quantized``): eight nibbles per int32 word.

Values -8..7 are stored plus 8, the first column in the lowest nibble. Weights are packed along their input features,
zero points, which have the same range, along the output features.
"""

import torch

NIBBLES = 8
_OFFSET = 8


def packed_columns(columns: int) -> int:
    """Number of int32 words that hold a row of ``columns`` 4-bit values."""
    return -(-columns // NIBBLES)


def unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack rows of words into signed values.

    Args:
        packed: int32 ``[rows, packed_columns(columns)]``.
        columns: values per row; the rest of the last word is not read.

    Returns:
        int8 ``[rows, columns]``, values -8..7.
    """
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[:, :columns] - _OFFSET).to(torch.int8)


def unpack_zero_points(packed: torch.Tensor, rows: int, matrices: int = 1) -> torch.Tensor:
    """Unpack zero points, whose words hold eight rows each.

    Args:
        packed: int32 ``[words, groups]``.
        rows: rows of all matrices together.
        matrices: number of matrices, one above the other, that have equally many rows and were packed separately.

    Returns:
        int8 ``[rows, groups]``, values -8..7.
    """
    return torch.cat([unpack_int4(words.t(), rows // matrices).t() for words in packed.chunk(matrices)])


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, columns: int, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantize weights: ``(value - zero point) * scale`` in the dtype of the scales.

    Args:
        packed: int32 ``[rows, packed_columns(columns)]``.
        scale: floating ``[rows, groups]``, where ``groups`` divides ``columns``; one group is channel quantization.
        columns: input features.
        zero_point: int8 ``[rows, groups]`` for asymmetric quantization.

    Returns:
        ``[rows, columns]`` in the dtype of ``scale``.
    """
    rows, groups = scale.shape
    values = unpack_int4(packed, columns).to(scale.dtype)
    if columns == 0:
        return values
    values = values.view(rows, groups, columns // groups)
    if zero_point is not None:
        values = values - zero_point.to(scale.dtype).unsqueeze(-1)
    return (values * scale.unsqueeze(-1)).view(rows, columns)
