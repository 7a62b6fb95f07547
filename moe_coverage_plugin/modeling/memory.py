"""Gives memory back to the system as soon as pruning needs it no more. Works on Linux, with glibc."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

# numbers of the C headers malloc.h and linux/mman.h
M_MMAP_THRESHOLD = -3
MADV_PAGEOUT = 21
INITIAL_THRESHOLD = 128 * 1024

Range = tuple[int, int]


def return_freed_tensors() -> None:
    """Let every tensor from 128 KiB on go back to the system when it is freed, for this process from now on.

    glibc begins so, but takes its heap for ever larger ones, up to 32 MiB, once it has seen such a one freed. Pruning
    and packing replace every weight by a smaller one, and what lies between those in the heap can never go back.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, INITIAL_THRESHOLD)


def mapped_ranges() -> list[Range]:
    """Addresses, from and to, at which this process has files mapped, as transformers opens checkpoints on a CPU."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return [(int(begin, 16), int(end, 16)) for begin, end in re.findall(r"^(\w+)-(\w+) .* /.*$", text, re.MULTILINE)]


def drop_mapped_pages(tensors: Iterable[Tensor], ranges: Sequence[Range]) -> None:
    """Take the pages of tensors that lie in mapped files out of memory, where they would stay as long as any tensor of
    the same file is in use. Changes no value: they are read again where somebody asks.

    Args:
        ranges: :func:`mapped_ranges`; other tensors are left alone, their pages could only go to swap.
    """
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if tensor.device.type == "cpu" and any(low <= begin and end <= high for low, high in ranges):
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            length = ctypes.c_size_t(max(0, end // mmap.PAGESIZE * mmap.PAGESIZE - first))
            # advice: kernels before 5.4 do not know it and go on
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), length, MADV_PAGEOUT)
