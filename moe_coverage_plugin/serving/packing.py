"""4-bit weights as compressed-tensors stores them (``pack-quantized``): eight nibbles to an int32 word.

Values -8..7 are stored plus 8, the first column in the lowest nibble, packed along the input dimension.
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


def dequantize(packed: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    """Weights of symmetric group or channel quantization, ``value * scale`` in the dtype of the scales.

    Args:
        packed: int32 ``[rows, packed_columns(columns)]``.
        scale: floating ``[rows, groups]``, ``columns`` a multiple of ``groups``; one group is channel quantization.
        columns: input dimension.

    Returns:
        ``[rows, columns]`` in the dtype of ``scale``.
    """
    rows, groups = scale.shape
    values = unpack_int4(packed, columns).to(scale.dtype)
    if columns == 0:
        return values
    return (values.view(rows, groups, columns // groups) * scale.unsqueeze(-1)).view(rows, columns)
