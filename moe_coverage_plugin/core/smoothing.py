"""Smoothing of the importance of layers, so that outliers do not take the budget (paper, appendix C.3.3).

The importance of experts is always smoothed by its square root.
"""

from __future__ import annotations

import torch
from torch import Tensor, where

from moe_coverage_plugin.core.checks import require_finite
from moe_coverage_plugin.options import Smoothing

LOG_SLOPE = 5.0
OUTLIER_STDS = 0.5


def smooth(importance: Tensor, method: Smoothing) -> Tensor:
    """Compress the range of importance along the last axis (experts of a layer, or layers).

    With the mean ``mu`` and the standard deviation ``sigma`` of the population, and ``delta = mu + 0.5 sigma``:

    - ``sqrt``: square root.
    - ``log``: ``log(1 + 5 x)``. It depends on the unit of ``x``; the loss of layers is in nats per token.
    - ``huber``: ``x`` up to ``delta``, and ``delta + sqrt(delta (x - delta))`` beyond it.
    - ``clip``: ``x`` limited to ``mu - 0.5 sigma`` and ``mu + 0.5 sigma``.

    Every method is monotone. All but ``clip`` map zero to zero. Negative input (a signed first-order score can be
    negative) is treated as zero.

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
            return torch.log1p(LOG_SLOPE * x)
        case "huber":
            _, delta = _limits(x)
            # two roots, because the product of tiny numbers underflows
            return where(x <= delta, x, delta + delta.sqrt() * (x - delta).clamp(min=0).sqrt())
        case "clip":
            lower, upper = _limits(x)
            return x.maximum(lower).minimum(upper)


def _limits(x: Tensor) -> tuple[Tensor, Tensor]:
    """``mu - 0.5 sigma`` and ``mu + 0.5 sigma``."""
    mean, spread = x.mean(-1, keepdim=True), OUTLIER_STDS * x.std(-1, correction=0, keepdim=True)
    return mean - spread, mean + spread
