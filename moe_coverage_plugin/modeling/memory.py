"""Says how much memory is free, and returns memory to the system as soon as pruning no longer needs it.

The latter works on Linux with glibc.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import psutil
import torch
from torch import Tensor

# constants of the C headers malloc.h and linux/mman.h
M_MMAP_THRESHOLD = -3
MADV_PAGEOUT = 21
INITIAL_THRESHOLD = 128 * 1024

# of a container, if its limit is below the memory of the machine
CGROUP = Path("/sys/fs/cgroup")

Range = tuple[int, int]


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device.

    On a GPU, what PyTorch has reserved and does not use counts as free, and the limit of
    ``torch.cuda.set_per_process_memory_fraction`` holds. On a CPU, so does that of a container.
    """
    if device.type != "cuda":
        return free_host_memory()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    left = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, left)) + reserved - torch.cuda.memory_allocated(device)


def free_host_memory() -> int:
    """Bytes of host memory that can still be allocated; pages of files count as free."""
    free = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        pages = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    files = sum(int(pages.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, min(free, int(limit) - used + files))


def return_pinned_memory() -> None:
    """Return the pinned host memory that PyTorch keeps after its tensors were freed; nothing without a GPU."""
    if torch.cuda.is_available():
        # releases before 2.12 have the function in a private module only
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty_host_cache()


def return_freed_tensors() -> None:
    """Return every tensor of 128 KiB or more to the system when it is freed, in this process from now on.

    This is glibc's initial behaviour. After a larger tensor was freed, glibc takes tensors of that size, up to 32 MiB,
    from its heap. Pruning and packing replace every weight by a smaller one, and heap memory between these is never
    returned.
    """
    with suppress(OSError, AttributeError):
        # patch: malloc-threshold
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, INITIAL_THRESHOLD)


def mapped_ranges() -> list[Range]:
    """Return the address ranges of mapped files; transformers opens checkpoints on a CPU by mapping their files."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return [(int(begin, 16), int(end, 16)) for begin, end in re.findall(r"^(\w+)-(\w+) .* /.*$", text, re.MULTILINE)]


def drop_mapped_pages(tensors: Iterable[Tensor], ranges: Sequence[Range]) -> None:
    """Drop the pages of tensors in mapped files from memory. No value changes: pages are read again when needed.

    Without this they would stay in memory as long as any tensor of the same file is in use.

    Args:
        tensors: those outside of ``ranges`` are skipped, because their pages could only be swapped out.
        ranges: from :func:`mapped_ranges`.
    """
    ordered = sorted(ranges)
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        # ranges do not overlap, so only the last one that begins before the tensor can contain it
        number = bisect_right(ordered, begin, key=itemgetter(0))
        if tensor.device.type == "cpu" and number and end <= ordered[number - 1][1]:
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            length = ctypes.c_size_t(max(0, end // mmap.PAGESIZE * mmap.PAGESIZE - first))
            # an error is ignored: kernels before 5.4 do not support this advice
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), length, MADV_PAGEOUT)
