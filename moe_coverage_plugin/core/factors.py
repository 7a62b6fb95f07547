"""Triangular factors of inverse matrices, of many matrices together."""

from __future__ import annotations

import torch
from torch import Tensor

# columns that are factorized by the library; the rest of the work is batched products
BLOCK = 256


@torch.no_grad()
def inverse_factor(matrix_EAA: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Upper triangular ``U`` with ``U^T U = M^-1`` for each symmetric ``M``, without a wait for the device.

    With the order of rows and columns reversed (``J M J``) and its Cholesky factor ``L``, ``U`` is ``J L^-1 J``: one
    factorization and one triangular inverse. To factorize ``M``, invert it and factorize the inverse takes about twice
    the arithmetic, and on a GPU libraries invert one matrix after the other.

    Args:
        matrix_EAA: ``M``; its memory is used.
        block: columns that are factorized at once.

    Returns:
        ``[E, A, A]``, zero below the diagonal, and ``[E]``: whether ``M`` is positive definite, without which the
        factor means nothing.
    """
    lower_EAA = matrix_EAA.flip(-2, -1)
    inverse_EAA = matrix_EAA.zero_()
    solved_E = torch.ones(len(matrix_EAA), dtype=torch.bool, device=matrix_EAA.device)
    size = matrix_EAA.shape[-1]
    for first in range(0, size, block):
        last = min(first + block, size)
        rows = lower_EAA[:, first:last, :first]
        if first:
            lower_EAA[:, first:, first:last] -= lower_EAA[:, first:, :first] @ rows.mT
        factor_EBB, info_E = torch.linalg.cholesky_ex(lower_EAA[:, first:last, first:last])
        identity_BB = torch.eye(last - first, dtype=factor_EBB.dtype, device=factor_EBB.device)
        half_EBB = torch.linalg.solve_triangular(factor_EBB, identity_BB.expand_as(factor_EBB), upper=False)
        solved_E &= (info_E == 0) & half_EBB.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        inverse_EAA[:, first:last, first:last] = half_EBB
        if first:
            inverse_EAA[:, first:last, :first] = -half_EBB @ (rows @ inverse_EAA[:, :first, :first])
        if last < size:
            lower_EAA[:, last:, first:last] = torch.linalg.solve_triangular(
                factor_EBB.mT, lower_EAA[:, last:, first:last], upper=True, left=False
            )
    del lower_EAA
    return inverse_EAA.flip(-2, -1), solved_E
