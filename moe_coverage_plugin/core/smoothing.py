"""Smoothing of importance before it becomes a prior, so that outliers do not take the budget (paper, app. C.3.3)."""

from __future__ import annotations

import torch
from torch import Tensor, where

from moe_coverage_plugin.core.checks import require_finite
from moe_coverage_plugin.options import Smoothing

LOG_SLOPE = 5.0
OUTLIER_STDS = 0.5


def smooth(importance: Tensor, method: Smoothing) -> Tensor:
    """Compress the range of importance along the last axis (experts of a layer, or layers).

    ``sqrt``: square root. ``log``: ``log(1 + 5 x)`` with ``x`` relative to the mean, so that the result does not
    depend on the number of calibration tokens. ``huber``: unchanged up to
    ``delta = mean + 0.5 std``, beyond it ``sqrt(2 delta x - delta^2)``, with equal value and slope at ``delta``.
    ``clip``: ``min(x, mean + 0.5 std)``. The standard deviation is the population's. Every method is monotone and maps
    zero to zero; negative input (a signed first-order score can be negative) is treated as zero.

    Args:
        importance: ``[L, E]`` or one row ``[G]``, floating or integer, any device.
        method: one of ``Smoothing``.

    Returns:
        float64 of the same shape, on the CPU.

    Raises:
        CoverageError: an entry is NaN or infinite.
    """
    x = importance.detach().to("cpu", torch.float64)
    require_finite(x, "importances", ("layer", "expert") if x.ndim == 2 else ("entry",))
    x = x.clamp(min=0)
    match method:
        case "none":
            return x
        case "sqrt":
            return x.sqrt()
        case "log":
            mean = x.mean(-1, keepdim=True)
            return torch.log1p(LOG_SLOPE * x / where(mean > 0, mean, 1))
        case "huber":
            delta = _outlier_limit(x)
            unit = where(delta > 0, delta, 1)
            # as a ratio, because squares of tiny numbers underflow
            return where(x <= delta, x, delta * (2 * x.maximum(unit) / unit - 1).sqrt())
        case "clip":
            return x.minimum(_outlier_limit(x))


def _outlier_limit(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True) + OUTLIER_STDS * x.std(-1, correction=0, keepdim=True)
