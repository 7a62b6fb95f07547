"""Keeps a router from choosing experts that were removed, and checks that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading, get_execution_device, update_offload_parameter
from compressed_tensors.utils import align_module_device
from llmcompressor.utils.helpers import eval_context
from loguru import logger
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import (
    MoELayer,
    chooses_by_token_table,
    correction_biases,
    expert_linears,
    router_needs,
)

# the functions by which a router may compute its logits; the operator @ is Tensor.matmul
PRODUCTS = frozenset(
    [
        *(linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
        *(torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm),
        *(torch.inner, Tensor.inner, torch.tensordot, torch.einsum),
    ]
)
PROBE_TOKENS = 64
# far from 0 for a sigmoid, but not so far that a softmax in 32 bits rounds to 0
PROBE_LOGIT = 15.0
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
        self.checks_next_output = False
        """Whether to look for removed experts in the next output, because no probe could be made."""

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
        if output is None:
            return
        if mode.masked:
            if self.checks_next_output:
                _check_output(self._name, router, output, self._removed_E)
                self.checks_next_output = False
            return
        if mode.widths:
            raise CoverageError(
                f"the router of {self._name} has {mode.widths[-1]} outputs but {self._removed_E.numel()} experts were "
                "counted when channels were pruned: remove entire experts (REAP) before pruning channels, not after"
            )
        raise CoverageError(
            f"the router of {self._name} ({type(router).__name__}) computes its logits by none of linear, matmul, mm, "
            f"addmm, bmm, inner, tensordot and einsum, so removed experts cannot be masked: {REMEDY}"
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
        if func not in PRODUCTS or not isinstance(out, Tensor) or out.ndim == 0:
            return out
        if out.shape[-1] != self._removed_E.numel():
            self.widths.append(out.shape[-1])
            return out
        self.masked = True
        if (kwargs or {}).get("out") is not None:
            return out.masked_fill_(self._removed_E.to(out.device), float("-inf"))
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
    with ExitStack() as undo:
        mask = _install(layer, removed_E, undo)
        mask.checks_next_output = not _check_mask(layer, removed_E)
        # nothing was raised, so the mask stays
        undo.pop_all()


def check_maskable(layer: MoELayer) -> None:
    """Check that any experts that a plan may remove from a layer can be masked, before anything is calibrated.

    The mask is tried with as few kept experts as the router needs, and removed again.

    Raises:
        CoverageError: names the class of the router and what to do instead.
    """
    needs = router_needs(layer)
    size = layer.num_experts // needs.groups
    for kept in (slice(0, needs.needed), slice(size - needs.needed, size)):
        removed_GE = torch.ones(needs.groups, size, dtype=torch.bool)
        removed_GE[:, kept] = False
        if removed_GE.any():
            with ExitStack() as undo:
                _install(layer, removed_GE.flatten(), undo)
                _check_mask(layer, removed_GE.flatten())


def _install(layer: MoELayer, removed_E: Tensor, undo: ExitStack) -> RouterMask:
    mask = RouterMask(layer.name, removed_E)
    # patch: transformers-router-mask
    undo.callback(layer.router.register_forward_pre_hook(mask.enter).remove)
    undo.callback(layer.router.register_forward_hook(mask.leave, always_call=True).remove)
    for module, name in correction_biases(layer):
        bias = getattr(module, name).detach().clone()
        update_offload_parameter(module, name, bias.masked_fill(removed_E.to(bias.device), float("-inf")))
        undo.callback(update_offload_parameter, module, name, bias)
    return mask


@torch.no_grad()
def _check_mask(layer: MoELayer, removed_E: Tensor) -> bool:
    """Run the router on hidden states that try to reach removed experts; whether it could be run."""
    if torch.device(get_execution_device(layer.router)).type == "meta":
        return True
    output = _probe(layer, _probe_states(layer, removed_E))
    if output is None:
        return False
    _check_output(layer.name, layer.router, output, removed_E)
    return True


def _check_output(name: str, router: Module, output: Any, removed_E: Tensor) -> None:
    """Look for removed experts in everything that a router returned."""
    for tensor in _tensors(output):
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
                f"the router of {name} ({type(router).__name__}) chooses removed experts although their logits are "
                f"-inf: {REMEDY}"
            )


def _probe_states(layer: MoELayer, removed_E: Tensor) -> Tensor:
    """Hidden states ``[T, H]``: random ones, and those for which a router would choose only removed experts."""
    experts, hidden_size = len(removed_E), next(iter(expert_linears(layer))).in_features
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(PROBE_TOKENS, hidden_size, generator=generator)]
    shapes = ((experts, hidden_size), (hidden_size, experts))
    weight = next((each for each in layer.router.parameters() if each.shape in shapes), None)
    if weight is not None:
        with align_module_device(layer.router):
            rows_EH = (weight if weight.shape == shapes[0] else weight.T).detach().to("cpu", torch.float32)
        wanted_1E = torch.where(removed_E, PROBE_LOGIT, -PROBE_LOGIT)[None]
        gram_EE = rows_EH @ rows_EH.T
        gram_EE += 1e-6 * gram_EE.diagonal().mean() * torch.eye(experts)
        # the shortest hidden state with the wanted logits
        states += [rows_EH[removed_E], torch.linalg.solve(gram_EE, wanted_1E.T).T @ rows_EH]
    return torch.cat(states).nan_to_num()


def _probe(layer: MoELayer, hidden_TH: Tensor) -> Any:
    """The router's output for hidden states; ``None`` if it can be run neither alone nor by its layer."""
    # an offloaded module may have the name of its device
    router, device = layer.router, torch.device(get_execution_device(layer.router))
    hidden_TH = hidden_TH.to(device, _dtype(router))
    outputs: list[Any] = []
    handle = router.register_forward_hook(lambda _router, _args, output: outputs.append(output))
    # some routers take tokens, others samples and positions
    attempts = [(router, hidden_TH), (router, hidden_TH[None]), (layer.moe, hidden_TH[None])]
    devices = [device] if device.type == "cuda" else []
    reason: Exception | None = None
    try:
        for module, hidden in attempts:
            try:
                with eval_context(module), torch.random.fork_rng(devices=devices):
                    module(hidden)
                return outputs[-1]
            except CoverageError:
                raise
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
                reason = reason or error
                outputs.clear()
    finally:
        handle.remove()
    logger.warning(
        f"The router of {layer.name} could not be run to check its mask, which is checked when it runs first: {reason}"
    )
    return None


def _dtype(router: Module) -> torch.dtype:
    with disable_onloading():
        return next((each.dtype for each in router.parameters() if each.is_floating_point()), torch.float32)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
