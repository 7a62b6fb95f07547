"""Keeps a router from choosing experts that were removed."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.offload import update_offload_parameter
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, correction_biases


class _MaskLogits(TorchFunctionMode):
    """Sets the logits of removed experts to -inf where a router computes them, before anything looks at them."""

    def __init__(self, removed_E: Tensor):
        super().__init__()
        self.removed_E = removed_E

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not linear:
            return out
        if out.shape[-1] != self.removed_E.numel():
            raise CoverageError(
                f"a router has {out.shape[-1]} outputs but {self.removed_E.numel()} experts were counted when "
                "channels were pruned: remove whole experts (REAP) before pruning channels, not after"
            )
        return out.masked_fill(self.removed_E.to(out.device), float("-inf"))


class RouterMask:
    """A pair of hooks that hold the mask while a router runs.

    Hooks rather than a replaced ``forward``: they also surround the ``forward`` that offloading installs, and they are
    copied with the model.
    """

    def __init__(self, removed_E: Tensor):
        self.removed_E = removed_E
        self._active: list[_MaskLogits] = []

    def enter(self, _router: Module, _args: tuple[Any, ...]) -> None:
        self._active.append(_MaskLogits(self.removed_E))
        self._active[-1].__enter__()

    def leave(self, _router: Module, _args: tuple[Any, ...], _output: Any) -> None:
        self._active.pop().__exit__(None, None, None)


def mask_router(layer: MoELayer) -> None:
    """Exclude the layer's removed experts from routing, in place; a layer that has none is left alone.

    Correction biases, which are added after the logits became scores, get -inf too; they are saved with the model.
    """
    removed_E = torch.tensor([width == 0 for width in layer.widths])
    if not removed_E.any():
        return
    mask = RouterMask(removed_E)
    layer.router.register_forward_pre_hook(mask.enter)
    layer.router.register_forward_hook(mask.leave, always_call=True)
    for module, name in correction_biases(layer):
        bias = getattr(module, name).detach()
        update_offload_parameter(module, name, bias.masked_fill(removed_E.to(bias.device), float("-inf")))
