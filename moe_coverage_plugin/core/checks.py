"""Checks scores and importances whose values would make an allocation meaningless."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.manifest import CoverageError


def require_finite(values: Tensor, what: str, axes: tuple[str, ...]) -> None:
    """Check that no entry is NaN or infinite.

    Args:
        values: any dtype, with one leading axis per name in ``axes`` and at most one more (the channels).
        what: the plural noun for the message, e.g. ``"channel scores"``.
        axes: names of the leading axes, e.g. ``("layer", "expert")``.

    Raises:
        CoverageError: an entry is; the message gives the first position along ``axes`` and their number.
    """
    # a sum is finite only if every term is, and costs a tenth of testing each channel
    total = values.sum(-1, dtype=torch.float64) if values.ndim > len(axes) else values
    _check(~total.isfinite(), total, f"{what} must be finite", axes)


def require_non_negative(values: Tensor, what: str, axes: tuple[str, ...]) -> None:
    """Check that no entry is NaN, infinite or negative; arguments and error as for :func:`require_finite`."""
    require_finite(values, what, axes)
    smallest = values.amin(-1) if values.ndim > len(axes) else values
    _check(smallest < 0, smallest, f"{what} must not be negative", axes)


def _check(bad: Tensor, found: Tensor, rule: str, axes: tuple[str, ...]) -> None:
    if not bool(bad.any()):
        return
    first = bad.nonzero()[0].tolist()
    position = " ".join(f"{axis} {index}" for axis, index in zip(axes, first, strict=True))
    raise CoverageError(
        f"{rule}, but {position} has {float(found[tuple(first)])} ({int(bad.sum())} such entries): check the "
        "calibration data, and the dtype of the activations for overflow"
    )
