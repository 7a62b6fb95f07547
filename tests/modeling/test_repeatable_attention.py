"""The switch of deterministic algorithms: on while the gradients of an attention are computed, and never else.

That gradients are then equal in every run was seen on a GPU, ``docs/patches.md``; a CPU always sums in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_coverage_plugin.modeling.repeatable_attention import _Settings, repeatable_attention


class Operations(TorchDispatchMode):
    """Records whether deterministic algorithms were on for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.deterministic: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.deterministic.setdefault(func.__name__, set()).add(torch.are_deterministic_algorithms_enabled())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    # AutoRound switches it on for the process
    found = _Settings.now()
    torch.use_deterministic_algorithms(False)
    before, cudnn = _Settings.now(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    after = _Settings.now(), torch.backends.cuda.cudnn_sdp_enabled()
    found.apply()
    assert after == (before, cudnn)


def gradients(hidden_BSH: Tensor, weight_OH: Tensor, recomputed: bool) -> Tensor:
    """Of hidden states through two attentions, as families of transformers call it."""

    def attention(x_BSH: Tensor) -> Tensor:
        query, key, value = linear(x_BSH, weight_OH).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        z = torch.nn.functional.scaled_dot_product_attention(query, key, value=value, is_causal=True)
        return x_BSH + z.transpose(1, 2).flatten(2)

    hidden_BSH = hidden_BSH.detach().requires_grad_()
    output = hidden_BSH
    for _ in range(2):
        output = checkpoint(attention, output, use_reentrant=True) if recomputed else attention(output)
    (output.square().sum()).backward()
    assert hidden_BSH.grad is not None
    return hidden_BSH.grad


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, 8, generator=generator), torch.randn(24, 8, generator=generator)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_switch_is_on_for_gradients_of_attention_alone(recomputed: bool) -> None:
    expected = gradients(*inputs(), recomputed)
    with repeatable_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with Operations() as operations:
            found = gradients(*inputs(), recomputed)
    assert torch.equal(found, expected)
    (backward,) = (name for name in operations.deterministic if "attention" in name and "backward" in name)
    assert operations.deterministic.pop(backward) == {True}
    # unpacks what the kernel has saved
    operations.deterministic.pop("detach.default")
    assert set().union(*operations.deterministic.values()) == {False}
    assert any("mm" in name for name in operations.deterministic)


def test_products_instead_of_a_kernel_leave_it_off() -> None:
    """With it, products on a GPU would need a setting of cuBLAS from the environment."""
    with repeatable_attention(), Operations() as operations, sdpa_kernel(SDPBackend.MATH):
        gradients(*inputs(), recomputed=False)
    assert set().union(*operations.deterministic.values()) == {False}


@pytest.mark.parametrize("warn_only", [False, True])
def test_settings_of_the_user_come_back(warn_only: bool) -> None:
    """The fixture compares them; also behind a backward pass that fails inside the attention."""
    first = _Settings.now()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    chosen = _Settings.now()
    try:
        with repeatable_attention():
            gradients(*inputs(), recomputed=False)
            assert _Settings.now() == chosen
        with pytest.raises(RuntimeError, match="out of memory"), repeatable_attention(), Failing():
            gradients(*inputs(), recomputed=False)
        assert _Settings.now() == chosen
    finally:
        first.apply()


class Failing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "attention" in func.__name__ and "backward" in func.__name__:
            raise RuntimeError("out of memory")
        return func(*args, **(kwargs or {}))
