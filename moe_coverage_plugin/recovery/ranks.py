"""Data-parallel ranks, started by ``torchrun`` or ``accelerate launch``; each trains on its part of every step.

``accelerate.PartialState`` does not replace this: by default, it takes each rank of ``torchrun`` on a CPU for the
only one, and it still reports the ranks after their process group is destroyed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks.

    Attributes:
        rank: index of this process.
        count: number of ranks.
        device: device that this process computes on.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Sum the gradients over all ranks, in place; a parameter without gradient gets zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count > 1:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            # one message, because there are many small adapters
            flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))

    def wait(self) -> None:
        """Wait until all ranks call this."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the process group of the launcher's environment, and leave it at the end; or use the one that exists."""
    own = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if own:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else Ranks(0, 1, device)
    finally:
        if own:
            dist.destroy_process_group()
