"""Programmatic dependent launch: programs of a kernel start while the last ones of the kernel before it still run.

Without it, a card is partly idle at the end of each kernel, and again until the next one has started. Cards have it
from compute capability 9.0 on.

Every kernel begins with the wait for the kernel before it, so nothing is read too early, and no memory is written that
a kernel still reads. Each lets the next one start only after its own wait. So while a kernel waits, no kernel but the
one directly before it still runs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(device: torch.device, early: bool = True) -> dict[str, bool]:
    """Arguments of a launch: ``PDL``, which all kernels have, and Triton's own option.

    Args:
        device: of the kernel.
        early: whether programs may start early.
    """
    used = early and is_available(device)
    return {"PDL": used, "launch_pdl": used}


@cache
def is_available(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until the kernel before this one has finished; then let the next one start once all programs came here."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
