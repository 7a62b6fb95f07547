"""4-bit weights as compressed-tensors stores them (``pack-quantized``): eight nibbles to an int32 word.

Values -8..7 are stored plus 8, the first column in the lowest nibble, packed along the input dimension. Zero points,
in the same range, are packed along the output dimension.
"""

import torch

NIBBLES = 8
_OFFSET = 8


def packed_columns(columns: int) -> int:
    """int32 words that hold one row of ``columns`` 4-bit values."""
    return -(-columns // NIBBLES)


def unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Signed values of packed words.

    Args:
        packed: int32 ``[rows, packed_columns(columns)]``.
        columns: values per row; the last word may be partly filled.

    Returns:
        int8 ``[rows, columns]``, values -8..7.
    """
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[:, :columns] - _OFFSET).to(torch.int8)


def unpack_zero_points(packed: torch.Tensor, rows: int, matrices: int = 1) -> torch.Tensor:
    """int8 ``[rows, groups]`` of packed words.

    Args:
        packed: int32 ``[words, groups]``.
        rows: of all matrices.
        matrices: of equally many rows, one above the other, each packed by itself.
    """
    return torch.cat([unpack_int4(words.t(), rows // matrices).t() for words in packed.chunk(matrices)])


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, columns: int, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights of group or channel quantization, ``(value - zero point) * scale`` in the dtype of the scales.

    Args:
        packed: int32 ``[rows, packed_columns(columns)]``.
        scale: floating ``[rows, groups]``, ``columns`` a multiple of ``groups``; one group is channel quantization.
        columns: input dimension.
        zero_point: int8 ``[rows, groups]``, of asymmetric quantization.

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
