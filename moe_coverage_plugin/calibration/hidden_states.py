"""Hidden states of many batches that move between a device and host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def moved_state(hidden: Tensor, place: torch.device, replaced: Tensor | None = None) -> Tensor:
    """Return a hidden state at another place.

    In host memory it is pinned, and the copy may not be complete yet: read it on the current stream only.

    Args:
        hidden: on the device of a decoder layer.
        place: device to keep it on.
        replaced: an earlier one whose memory may be used, if it has the same shape.
    """
    if hidden.device == place or place.type != "cpu":
        return hidden.to(place)
    if (
        replaced is None
        or replaced.device != place
        or replaced.shape != hidden.shape
        or replaced.dtype != hidden.dtype
    ):
        replaced = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=hidden.is_cuda)
    return replaced.copy_(hidden, non_blocking=True)
