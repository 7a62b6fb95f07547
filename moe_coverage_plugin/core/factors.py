"""Triangular factors of inverse matrices, of many matrices together."""

from __future__ import annotations

import torch
from torch import Tensor

# rows that the library factorizes; more are divided, because a GPU computes products of many matrices faster
BLOCK = 256


@torch.no_grad()
def inverse_factor(matrix_EAA: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Upper triangular ``U`` with ``U^T U = M^-1`` for each symmetric ``M``, without a wait for the device.

    With the order of rows and columns reversed (``J M J``), it is ``J W J`` for the ``W`` of :func:`inverse_cholesky`:
    one factorization and one triangular inverse. To factorize ``M``, invert it and factorize the inverse takes about
    twice the arithmetic.

    Args:
        matrix_EAA: ``M``; its memory is used.
        block: rows that are factorized at once.

    Returns:
        ``[E, A, A]``, zero below the diagonal, and ``[E]``: whether ``M`` is positive definite, without which the
        factor means nothing.
    """
    reversed_EAA, inverse_EAA = matrix_EAA.flip(-2, -1), matrix_EAA.zero_()
    solved_E = _invert(reversed_EAA, inverse_EAA, block)
    del reversed_EAA
    return inverse_EAA.flip(-2, -1), solved_E


@torch.no_grad()
def inverse_cholesky(matrix_EAA: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Lower triangular ``W = L^-1`` for ``M = L L^T``, so that ``W^T W = M^-1``; otherwise :func:`inverse_factor`.

    ``M`` is overwritten.
    """
    inverse_EAA = torch.zeros_like(matrix_EAA)
    return inverse_EAA, _invert(matrix_EAA, inverse_EAA, block)


def _invert(matrix_EAA: Tensor, inverse_EAA: Tensor, block: int) -> Tensor:
    """Write ``L^-1`` of each ``matrix = L L^T`` into ``inverse``, half by half; the matrix is overwritten.

    With ``M = [[A, B^T], [B, C]]`` and ``V = L_A^-1``, the lower left part of ``L`` is ``Y = B V^T``, the lower right
    one factorizes ``C - Y Y^T``, and the lower left part of ``L^-1`` is ``-L_C^-1 Y V``.

    Returns:
        ``[E]``: whether the matrix is positive definite.
    """
    size = matrix_EAA.shape[-1]
    if size <= block:
        factor_EAA, info_E = torch.linalg.cholesky_ex(matrix_EAA)
        identity_AA = torch.eye(size, dtype=factor_EAA.dtype, device=factor_EAA.device)
        inverse_EAA[:] = torch.linalg.solve_triangular(factor_EAA, identity_AA.expand_as(factor_EAA), upper=False)
        return (info_E == 0) & inverse_EAA.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    middle = -(-size // (2 * block)) * block
    head, tail = slice(middle), slice(middle, size)
    head_EVV, tail_EWW = inverse_EAA[:, head, head], inverse_EAA[:, tail, tail]
    solved_E = _invert(matrix_EAA[:, head, head], head_EVV, block)
    rows_EWV = matrix_EAA[:, tail, head] @ head_EVV.mT
    matrix_EAA[:, tail, tail] -= rows_EWV @ rows_EWV.mT
    solved_E &= _invert(matrix_EAA[:, tail, tail], tail_EWW, block)
    inverse_EAA[:, tail, head] = -tail_EWW @ (rows_EWV @ head_EVV)
    return solved_E
