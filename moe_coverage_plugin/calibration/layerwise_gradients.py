"""The pass over the calibration set for models whose weights are offloaded: groups of batches, layer by layer.

Each group goes forward through the decoder layers and, if gradients are needed, backward in the reverse order, where
each layer is computed again from its input, as activation checkpointing does. A layer is then loaded twice for a group
instead of twice for each batch. Inputs of all layers are kept in host memory, whose size decides how many batches are
a group. Observers get the same values in the same order as from :mod:`~moe_coverage_plugin.calibration.observation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from compressed_tensors.offload import get_execution_device
from llmcompressor.utils.helpers import disable_lm_head
from loguru import logger
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.decoder_chain import Batch, Calls, DecoderChain
from moe_coverage_plugin.calibration.hidden_states import moved_state
from moe_coverage_plugin.calibration.job_bar import with_progress
from moe_coverage_plugin.calibration.next_token import LossGradient
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.loaded_layers import LoadedLayers
from moe_coverage_plugin.modeling.memory import free_host_memory, return_pinned_memory

# of free host memory, the part that inputs of decoder layers may take, and the most that is of use
SHARE_OF_STATES, MOST_STATES = 0.25, 32 * 2**30

HOST = torch.device("cpu")

LossOf = Callable[[Tensor, Batch], LossGradient]


class GroupObserver(NamedTuple):
    """Functions that the pass calls.

    Attributes:
        enter: called before a decoder layer computes a batch.
        observed: called when a decoder layer has computed a batch.
        differentiated: called when the gradients of a batch have passed a decoder layer.
        finished: called when a group of batches has passed all layers, with the number of predicted tokens of each
            batch, or of all its tokens if there are no gradients.
    """

    enter: Callable[[Batch], None]
    observed: Callable[[Module], None]
    differentiated: Callable[[Module], None]
    finished: Callable[[list[int]], None]


def observe_groups(
    model: PreTrainedModel,
    chain: DecoderChain,
    batches: Sequence[Batch],
    observer: GroupObserver,
    loss_of: LossOf | None,
    title: str,
) -> None:
    """Take batches through the decoder layers, and back if there is a loss.

    Args:
        model: its weights have no gradients.
        chain: its decoder layers.
        batches: model inputs.
        observer: its functions are called for each layer and batch, batches in their order.
        loss_of: computes the loss and its gradient from the logits of a batch; ``None``: forward only, and all
            batches are one group.
        title: of the progress bar.
    """
    if not batches:
        return
    depth = len(chain.layers)
    groups = [list(batches)]
    if loss_of is not None:
        groups = _groups(batches, depth * _token_bytes(model, chain, batches[0]))
        logger.info(f"Weights are offloaded: {len(batches)} batches pass the decoder layers in {len(groups)} groups")
    order = chain.layers if loss_of is None else [*chain.layers, *reversed(chain.layers)]
    with LoadedLayers(order * len(groups)) as loaded:
        layers = iter(with_progress(loaded, title, total=len(loaded), unit="layer"))
        for batches_of_group in groups:
            group = _Group(model, chain, batches_of_group, observer, keeps_inputs=loss_of is not None)
            for _ in range(depth):
                group.forward(next(layers))
            if loss_of is not None:
                group.differentiate(loss_of)
                for _ in range(depth):
                    group.backward(next(layers))
            observer.finished(group.tokens)
        # ends the bar
        next(layers, None)
    return_pinned_memory()


class _Group:
    """Batches that pass the decoder layers together."""

    def __init__(
        self,
        model: PreTrainedModel,
        chain: DecoderChain,
        batches: Sequence[Batch],
        observer: GroupObserver,
        keeps_inputs: bool,
    ):
        self._chain, self._batches, self._observer, self._keeps_inputs = chain, batches, observer, keeps_inputs
        self.tokens = [batch["input_ids"].numel() for batch in batches]
        self._calls: list[Calls] = []
        # of each batch, before the layers that it has passed and before the next one
        self._states: list[list[Tensor]] = []
        self._gradients: list[Tensor | None] = []
        with torch.no_grad(), disable_lm_head(model):
            for batch in batches:
                hidden, calls = chain.first(batch)
                self._calls.append(calls)
                self._states.append([moved_state(hidden, HOST)])

    @torch.no_grad()
    def forward(self, layer: Module) -> None:
        """Take all batches through a decoder layer."""
        for index, batch in enumerate(self._batches):
            self._observer.enter(batch)
            states = self._states[index]
            output = self._chain.call(layer, self._calls[index], states[-1])
            if self._keeps_inputs:
                states.append(moved_state(output, HOST))
            else:
                states[-1] = moved_state(output, HOST, states[-1])
            self._observer.observed(layer)

    def differentiate(self, loss_of: LossOf) -> None:
        """Compute the gradients of the loss at the outputs of the last layer."""
        for index, batch in enumerate(self._batches):
            self._gradients.append(self._loss_gradient(index, batch, loss_of))

    def _loss_gradient(self, index: int, batch: Batch, loss_of: LossOf) -> Tensor | None:
        hidden = self._leaf(self._states[index].pop(), self._chain.layers[-1])
        with torch.enable_grad():
            logits = self._chain.logits(batch, hidden)
        _, self.tokens[index], gradient = loss_of(logits, batch)
        if not self.tokens[index]:
            return None
        torch.autograd.backward(logits, gradient)
        assert hidden.grad is not None
        return moved_state(hidden.grad, HOST)

    def backward(self, layer: Module) -> None:
        """Compute all batches again and take their gradients through a decoder layer."""
        for index, batch in enumerate(self._batches):
            state, gradient = self._states[index].pop(), self._gradients[index]
            # a batch that predicts no token has none
            if gradient is not None:
                self._observer.enter(batch)
                self._gradients[index] = self._backward(layer, self._calls[index], state, gradient)
                self._observer.differentiated(layer)

    def _backward(self, layer: Module, calls: Calls, state: Tensor, gradient: Tensor) -> Tensor:
        hidden = self._leaf(state, layer)
        with torch.enable_grad():
            output = self._chain.call(layer, calls, hidden)
        torch.autograd.backward(output, gradient.to(output.device, non_blocking=True))
        assert hidden.grad is not None
        return moved_state(hidden.grad, HOST, gradient)

    def _leaf(self, state: Tensor, layer: Module) -> Tensor:
        return state.detach().to(get_execution_device(layer), non_blocking=True).requires_grad_()


def _token_bytes(model: PreTrainedModel, chain: DecoderChain, batch: Batch) -> int:
    """Bytes of the hidden state of a token."""
    few = {"input_ids": batch["input_ids"][:1, :1]}
    with torch.no_grad(), disable_lm_head(model):
        hidden, _ = chain.first(few)
    return hidden.nbytes


def _groups(batches: Sequence[Batch], token_bytes: int) -> list[list[Batch]]:
    """Split batches, in their order, into as few groups as host memory allows, of about equal size.

    Raises:
        CoverageError: host memory is too small for one batch.
    """
    free = free_host_memory()
    room = min(SHARE_OF_STATES * free, MOST_STATES)
    sizes = [token_bytes * batch["input_ids"].numel() for batch in batches]
    if max(sizes) > free:
        raise CoverageError(
            f"the inputs of all decoder layers take {max(sizes) / 2**30:.1f} GiB of host memory for a batch, of which "
            f"{free / 2**30:.1f} GiB are free: calibrate on smaller batches or shorter samples"
        )
    count = max(1, -(-sum(sizes) // max(1, int(room))))
    return list(_split(batches, sizes, room, sum(sizes) / count))


def _split(batches: Sequence[Batch], sizes: Sequence[int], room: float, size: float) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    total = 0
    for batch, nbytes in zip(batches, sizes, strict=True):
        if group and (total + nbytes > room or total + nbytes / 2 > size):
            yield group
            group, total = [], 0
        group.append(batch)
        total += nbytes
    yield group
