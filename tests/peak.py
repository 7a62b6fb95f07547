"""How much memory a computation takes, counted by the tensors that it makes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within the context take at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return output

    def _add(self, count: int) -> None:
        self._now += count
        self.bytes = max(self.bytes, self._now)
