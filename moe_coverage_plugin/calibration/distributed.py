"""Exchanges statistics between data-parallel ranks, each of which calibrates on its own part of the data."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from compressed_tensors.distributed import get_source_rank, is_distributed
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")


def gather_over_ranks(value: T) -> list[T]:
    """The values of all ranks in rank order, on every rank; without a process group only the given value."""
    if not is_distributed():
        return [value]
    group = _cpu_group()
    values: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, value, group=group)
    finally:
        dist.destroy_process_group(group)
    return values


def sum_over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum CPU tensors over all ranks, in place.

    Sums are computed on the source rank and broadcast, so that all ranks have equal bits and decide alike. Without a
    process group the tensors are unchanged.
    """
    if not is_distributed():
        return tensors
    group = _cpu_group()
    try:
        for tensor in tensors.values():
            assert tensor.device == torch.device("cpu"), "ranks exchange statistics over gloo"
            dist.reduce(tensor, dst=get_source_rank(), group=group)
            dist.broadcast(tensor, src=get_source_rank(), group=group)
    finally:
        dist.destroy_process_group(group)
    return tensors


def _cpu_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank takes part in the default group"
    return group
