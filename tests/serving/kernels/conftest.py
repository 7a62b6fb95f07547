"""The kernels run on a GPU where there is one, in Triton's interpreter where there is none."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when kernels are defined, so before anything imports them.
    os.environ["TRITON_INTERPRET"] = "1"

GARBAGE = 2**30


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without values holds NaN, or numbers that are no index."""

    def poisoned(allocate):
        def allocate_and_fill(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(GARBAGE) if tensor.dtype in (torch.int32, torch.int64) else tensor

        return allocate_and_fill

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
