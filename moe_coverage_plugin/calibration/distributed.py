"""Exchanges statistics between data-parallel ranks, each of which calibrates on its own part of the data."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from compressed_tensors.distributed import get_source_rank, is_distributed
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")
# by the default group, with which they are destroyed
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def gather_over_ranks(value: T) -> list[T]:
    """The values of all ranks in rank order, on every rank; without a process group only the given value."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_cpu_group())
    return values


def sum_over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum CPU tensors over all ranks, in place.

    Sums are computed on the source rank and broadcast, so that all ranks have equal bits and decide alike. Without a
    process group the tensors are unchanged.
    """
    if not is_distributed():
        return tensors
    group = _cpu_group()
    for tensor in tensors.values():
        assert tensor.device == torch.device("cpu"), "ranks exchange statistics over gloo"
        dist.reduce(tensor, dst=get_source_rank(), group=group)
        dist.broadcast(tensor, src=get_source_rank(), group=group)
    return tensors


def _cpu_group() -> dist.ProcessGroup:
    """A gloo group of all ranks: made once, because that takes longer than an exchange."""
    default = dist.group.WORLD
    assert default is not None
    if default not in _groups:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank takes part in the default group"
        _groups[default] = group
    return _groups[default]
