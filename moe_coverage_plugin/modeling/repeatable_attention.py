"""Gradients of attention that are equal in every run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional

# its only setting is a property of the module's class, which type checkers do not find
MEMORY: Any = torch.utils.deterministic


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` sum its gradients in the same order every time, within the context.

    On Hopper, PyTorch prefers cuDNN's kernel, whose programs add to the gradients of queries in the order in which
    they finish. PyTorch's own kernels do so too, unless deterministic algorithms are switched on. This stops all
    operations that have no deterministic algorithm, so it is on only while the gradients of an attention are computed.
    Attention of other packages does not change.
    """
    attention, before = functional.scaled_dot_product_attention, _Settings.now()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        output = attention(*args, **kwargs)
        if (node := _attention_node(output)) is not None:
            node.register_prehook(lambda *_: REPEATABLE.apply())
            node.register_hook(lambda *_: before.apply())
        return output

    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        # patch: attention-gradients
        with patch_attr(functional, "scaled_dot_product_attention", attend):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        # a backward pass that failed has not done so
        before.apply()


class _Settings(NamedTuple):
    """PyTorch's settings of deterministic algorithms."""

    enabled: bool
    warn_only: bool
    fill_memory: bool

    @classmethod
    def now(cls) -> _Settings:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            MEMORY.fill_uninitialized_memory,
        )

    def apply(self) -> None:
        torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)
        MEMORY.fill_uninitialized_memory = self.fill_memory


REPEATABLE = _Settings(enabled=True, warn_only=False, fill_memory=False)


def _attention_node(output: Tensor) -> Node | None:
    """The step of the backward pass that computes an attention's gradients; ``None`` if it consists of products."""
    node = output.grad_fn
    # views and slices may follow the kernel
    while node is not None and "Attention" not in node.name():
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return node
