"""Triangular factors of inverse matrices, of many matrices together."""

from __future__ import annotations

import torch
from torch import Tensor

# rows that the library factorizes; more are divided, because a GPU computes products of many matrices faster
BLOCK = 512
# rows of the triangular matrices that the library inverts
TRIANGLE = 32


@torch.no_grad()
def inverse_factor(matrix_EAA: Tensor) -> tuple[Tensor, Tensor]:
    """Upper triangular ``U`` with ``U^T U = M^-1`` for each symmetric ``M``, without a wait for the device.

    With the order of rows and columns reversed (``J M J``), it is ``J W J`` for the ``W`` of :func:`inverse_cholesky`:
    one factorization and one triangular inverse. To factorize ``M``, invert it and factorize the inverse takes about
    twice the arithmetic.

    Args:
        matrix_EAA: ``M``; its memory is used.

    Returns:
        ``[E, A, A]``, zero below the diagonal, and ``[E]``: whether ``M`` is positive definite, without which the
        factor means nothing.
    """
    reversed_EAA, inverse_EAA = matrix_EAA.flip(-2, -1), matrix_EAA.zero_()
    solved_E = _invert(reversed_EAA, inverse_EAA)
    del reversed_EAA
    return inverse_EAA.flip(-2, -1), solved_E


@torch.no_grad()
def inverse_cholesky(matrix_EAA: Tensor) -> tuple[Tensor, Tensor]:
    """Lower triangular ``W = L^-1`` for ``M = L L^T``, so that ``W^T W = M^-1``; otherwise :func:`inverse_factor`.

    ``M`` is overwritten.
    """
    inverse_EAA = torch.zeros_like(matrix_EAA)
    return inverse_EAA, _invert(matrix_EAA, inverse_EAA)


def _invert(matrix_EAA: Tensor, inverse_EAA: Tensor) -> Tensor:
    """Write ``L^-1`` of each ``matrix = L L^T`` into ``inverse``, half by half; the matrix is overwritten.

    With ``M = [[A, B^T], [B, C]]`` and ``V = L_A^-1``, the lower left part of ``L`` is ``Y = B V^T``, the lower right
    one factorizes ``C - Y Y^T``, and the lower left part of ``L^-1`` is ``-L_C^-1 Y V``.

    Returns:
        ``[E]``: whether the matrix is positive definite.
    """
    size = matrix_EAA.shape[-1]
    if size <= BLOCK:
        factor_EAA, info_E = torch.linalg.cholesky_ex(matrix_EAA)
        _invert_triangles(factor_EAA, inverse_EAA)
        return (info_E == 0) & inverse_EAA.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    middle = -(-size // (2 * BLOCK)) * BLOCK
    head, tail = slice(middle), slice(middle, size)
    head_EVV, tail_EWW = inverse_EAA[:, head, head], inverse_EAA[:, tail, tail]
    solved_E = _invert(matrix_EAA[:, head, head], head_EVV)
    rows_EWV = matrix_EAA[:, tail, head] @ head_EVV.mT
    matrix_EAA[:, tail, tail] -= rows_EWV @ rows_EWV.mT
    solved_E &= _invert(matrix_EAA[:, tail, tail], tail_EWW)
    inverse_EAA[:, tail, head] = -tail_EWW @ (rows_EWV @ head_EVV)
    return solved_E


def _invert_triangles(factor_EAA: Tensor, inverse_EAA: Tensor) -> None:
    """Write ``L^-1`` of lower triangular matrices: all small ones on their diagonals at once, then pairs of these.

    With ``L = [[A, 0], [C, D]]``, the lower left part of ``L^-1`` is ``-D^-1 C A^-1``.
    """
    size, whole = factor_EAA.shape[-1], TRIANGLE
    while 2 * whole <= size:
        whole *= 2
    if whole < size:
        head, tail = slice(whole), slice(whole, size)
        for part in (head, tail):
            _invert_triangles(factor_EAA[:, part, part], inverse_EAA[:, part, part])
        inverse_EAA[:, tail, head] = (
            -inverse_EAA[:, tail, tail] @ factor_EAA[:, tail, head] @ inverse_EAA[:, head, head]
        )
        return
    side = max(1, min(size, TRIANGLE))
    small_EBSS = _diagonal_blocks(factor_EAA, side)
    identity_SS = torch.eye(side, dtype=factor_EAA.dtype, device=factor_EAA.device)
    _diagonal_blocks(inverse_EAA, side)[:] = torch.linalg.solve_triangular(
        small_EBSS, identity_SS.expand_as(small_EBSS), upper=False
    )
    while side < size:
        pairs_EBSS, factors_EBSS = (_diagonal_blocks(each, 2 * side) for each in (inverse_EAA, factor_EAA))
        first_EBSS, second_EBSS = pairs_EBSS[..., :side, :side], pairs_EBSS[..., side:, side:]
        pairs_EBSS[..., side:, :side] = -second_EBSS @ factors_EBSS[..., side:, :side] @ first_EBSS
        side *= 2


def _diagonal_blocks(matrix_EAA: Tensor, side: int) -> Tensor:
    """The square blocks ``[E, B, S, S]`` on the diagonals, as a view."""
    blocks_EBSBS = matrix_EAA.unflatten(2, (-1, side)).unflatten(1, (-1, side))
    return blocks_EBSBS.diagonal(dim1=1, dim2=3).movedim(-1, 1)
