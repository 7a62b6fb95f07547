"""Data-parallel ranks, as ``torchrun`` and ``accelerate launch`` start them: each trains on its part of every step."""

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
    """This process among all of them.

    Attributes:
        device: where it computes.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether it is the one that writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Give every rank the sum of all ranks' gradients; a parameter that no token reached has zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count > 1:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            # one message: adapters are small and many
            flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the process group that the launcher's environment describes, or the one that there is."""
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
