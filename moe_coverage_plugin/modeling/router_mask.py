"""Keeps a router from choosing experts that were removed, and checks that it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.offload import get_execution_device, update_offload_parameter
from llmcompressor.utils.helpers import eval_context
from loguru import logger
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, chooses_by_token_table, correction_biases

# the functions by which a router may compute its logits; the operator @ is Tensor.matmul
PRODUCTS = frozenset(
    (linear, torch.matmul, Tensor.matmul, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.einsum)
)
PROBE_TOKENS = 64
REMEDY = "use layout='padded', which removes no expert, or list the layer in ignore"


class RouterMask:
    """A pair of hooks that set the logits of removed experts to -inf while a router runs.

    They are hooks instead of a replaced ``forward``, because hooks also surround the ``forward`` that offloading
    installs, and are copied with the model.
    """

    def __init__(self, name: str, removed_E: Tensor):
        """Prepare the hooks.

        Args:
            name: of the layer, for messages.
            removed_E: bool, the removed experts.
        """
        self._name, self._removed_E = name, removed_E
        self._active: list[_MaskLogits] = []

    def enter(self, _router: Module, _args: tuple[Any, ...]) -> None:
        """Forward pre-hook."""
        self._active.append(_MaskLogits(self._removed_E))
        self._active[-1].__enter__()

    def leave(self, router: Module, _args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, also called (without output) if the router has raised.

        Raises:
            CoverageError: no logits of all experts were computed, so nothing was masked.
        """
        if not self._active:
            return
        mode = self._active.pop()
        mode.__exit__(None, None, None)
        if output is None or mode.masked:
            return
        if mode.widths:
            raise CoverageError(
                f"the router of {self._name} has {mode.widths[-1]} outputs but {self._removed_E.numel()} experts were "
                "counted when channels were pruned: remove entire experts (REAP) before pruning channels, not after"
            )
        raise CoverageError(
            f"the router of {self._name} ({type(router).__name__}) computes its logits by none of linear, matmul, mm, "
            f"addmm and einsum, so removed experts cannot be masked: {REMEDY}"
        )


class _MaskLogits(TorchFunctionMode):
    """Masks logits where a router computes them, before anything reads them."""

    def __init__(self, removed_E: Tensor):
        super().__init__()
        self._removed_E = removed_E
        self.masked = False
        # of other products
        self.widths: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in PRODUCTS:
            return out
        if out.shape[-1] != self._removed_E.numel():
            self.widths.append(out.shape[-1])
            return out
        self.masked = True
        return out.masked_fill(self._removed_E.to(out.device), float("-inf"))


def mask_router(layer: MoELayer) -> None:
    """Exclude the removed experts of a layer from routing, in place; a layer without any is left unchanged.

    Correction biases, which are added after the logits became scores, are set to -inf too; they are saved with the
    model. The router then runs once on random hidden states, unless its weights have no values yet.

    Raises:
        CoverageError: the router chooses removed experts nevertheless, or its logits cannot be masked.
    """
    removed_E = torch.tensor([width == 0 for width in layer.widths])
    if not removed_E.any():
        return
    if chooses_by_token_table(layer):
        raise CoverageError(
            f"the router of {layer.name} chooses experts by a table of token ids, so {int(removed_E.sum())} removed "
            f"experts cannot be masked: {REMEDY}"
        )
    mask = RouterMask(layer.name, removed_E)
    # patch: transformers-router-mask
    handles = [
        layer.router.register_forward_pre_hook(mask.enter),
        layer.router.register_forward_hook(mask.leave, always_call=True),
    ]
    for module, name in correction_biases(layer):
        bias = getattr(module, name).detach()
        update_offload_parameter(module, name, bias.masked_fill(removed_E.to(bias.device), float("-inf")))
    try:
        _check_mask(layer, removed_E)
    except CoverageError:
        for handle in handles:
            handle.remove()
        raise


@torch.no_grad()
def _check_mask(layer: MoELayer, removed_E: Tensor) -> None:
    """Run the router once, and look for removed experts in everything that it returns."""
    for tensor in _tensors(_probe(layer, removed_E)):
        if not tensor.is_floating_point():
            wrong = torch.isin(tensor, removed_E.nonzero().to(tensor.device))
        elif tensor.shape[-1] == len(removed_E):
            # logits, or scores made of them
            removed = tensor[..., removed_E.to(tensor.device)]
            wrong = (removed != 0) & (removed != float("-inf"))
        else:
            wrong = tensor.isnan()
        if bool(wrong.any()):
            raise CoverageError(
                f"the router of {layer.name} ({type(layer.router).__name__}) chooses removed experts although their "
                f"logits are -inf: {REMEDY}"
            )


def _probe(layer: MoELayer, removed_E: Tensor) -> Any:
    """The router's output for random hidden states, and for those that point to the removed experts."""
    router = layer.router
    if get_execution_device(router) == torch.device("meta"):
        return None
    weight = next((each for each in router.parameters() if each.ndim == 2 and len(removed_E) in each.shape), None)
    reason: Exception | str = f"it has no weight for {len(removed_E)} experts"
    if weight is not None:
        rows_EH = weight if weight.shape[0] == len(removed_E) else weight.T
        generator = torch.Generator().manual_seed(0)
        random_TH = torch.randn(PROBE_TOKENS, rows_EH.shape[1], generator=generator).to(rows_EH)
        hidden_TH = torch.cat([random_TH, rows_EH[removed_E.to(rows_EH.device)]])
        # some routers take tokens, others samples and positions
        for hidden in (hidden_TH, hidden_TH[None]):
            try:
                with eval_context(router):
                    return router(hidden)
            except CoverageError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                reason = error
    logger.warning(f"The router of {layer.name} could not be run to check its mask: {reason}")
    return None


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
