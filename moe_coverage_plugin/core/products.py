"""Products of matrices on the tensor cores of a GPU, where that loses nothing that matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two matrices, or of batches of as many, in float32 or wider.

    The product of two 16-bit numbers is exact in float32. On a GPU, 16-bit matrices are therefore multiplied as they
    are, and only the sums are rounded, in float32: this is as accurate as to convert both to float32 first, and about
    ten times faster. The CPU has no such product and converts.
    """
    if left.is_cuda and left.numel() and left.dtype == right.dtype and left.dtype in SIXTEEN_BITS:
        product = torch.mm if left.dim() == 2 else torch.bmm
        return product(left, right, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return left.to(dtype) @ right.to(dtype)


def rounded_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` of operands in ``dtype``, summed in float32 or wider and rounded to ``dtype``."""
    left, right = left.to(dtype), right.to(dtype)
    # processors without instructions for 16 bits take many times as long for their products
    return left @ right if left.is_cuda or dtype not in SIXTEEN_BITS else wide_product(left, right).to(dtype)


@contextmanager
def tf32_products(enabled: bool = True) -> Iterator[None]:
    """Let float32 matrices be multiplied in TF32 on GPUs, within the context.

    Operands are rounded to 11 significant bits (bfloat16 has 8), and sums are in float32.

    Args:
        enabled: whether to change anything.
    """
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if enabled:
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        if enabled:
            settings.fp32_precision = before
