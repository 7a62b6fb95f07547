"""Calls the decoder layers of a model one by one, and what is before and behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import get_execution_device
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.next_token import model_inputs
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.grouped_experts import replaced_forward

# of the norm of hidden states: far above the rounding of bfloat16 sums in another order, far below a wrong argument
TOLERANCE = 0.05
# of the first sample, when layers are checked before other passes
CHECKED_TOKENS = 8

Batch = Mapping[str, Tensor]


class LayerCall(NamedTuple):
    """Arguments of a decoder layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# by the id of the layer
Calls = Mapping[int, LayerCall]


class DecoderChain:
    """The decoder layers of a model in the order of their calls.

    Attributes:
        layers: the decoder layers.
    """

    def __init__(self, model: PreTrainedModel, candidates: Sequence[Module], batch: Batch):
        """Find the order, and compare layer by layer with the model's own forward.

        Args:
            model: without its head, in a context in which calls of decoder layers compute as they will later.
            candidates: the decoder layers, in any order.
            batch: to run.

        Raises:
            CoverageError: the decoder layers cannot be called one by one.
        """
        self._model = model
        self.layers, self._tuples, expected = _order(model, candidates, batch)
        hidden, calls = self.first(batch)
        for layer in self.layers:
            hidden = self.call(layer, calls, hidden)
        difference = float((hidden.double() - expected.to(hidden.device).double()).norm())
        # observers name the expert if hidden states are not finite
        if bool(torch.isfinite(expected).all()) and not difference <= TOLERANCE * float(expected.double().norm()):
            raise CoverageError(
                f"the decoder layers of {type(model).__name__}, called one by one, differ from the model by "
                f"{difference / float(expected.double().norm()):.0%}, above {TOLERANCE:.0%}: choose "
                "channel_metric='fisher' and reconstruct=False"
            )

    def first(self, batch: Batch) -> tuple[Tensor, Calls]:
        """Run what is before the decoder layers: the input of the first one, and the other arguments of all."""
        first: list[Tensor] = []
        calls: dict[int, LayerCall] = {}

        def keep(layer: Module, hidden: Tensor, call: LayerCall) -> Tensor:
            first.append(hidden)
            calls[id(layer)] = call
            return hidden

        self._run(batch, keep)
        return first[0], calls

    def call(self, layer: Module, calls: Calls, hidden: Tensor) -> Tensor:
        """Call a decoder layer with the other arguments that it gets in a batch."""
        call = calls[id(layer)]
        # a copy, because a layer may write into its input, which may pass the layer again
        copied = hidden.to(get_execution_device(layer), copy=True, non_blocking=True)
        return _tensor(layer(copied, *call.args, **call.kwargs))

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Run what is behind the decoder layers.

        Args:
            batch: whose labels are not used.
            hidden: output of the last decoder layer.
        """

        def replace(layer: Module, own: Tensor, _call: LayerCall) -> Tensor:
            return hidden if layer is self.layers[-1] else own

        return self._run(batch, replace).logits

    def _run(self, batch: Batch, replace: Callable[[Module, Tensor, LayerCall], Tensor]) -> Any:
        """Run the model with another function in place of each decoder layer."""

        def stub(layer: Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if args:
                    hidden, *others = args
                else:
                    hidden, others = kwargs["hidden_states"], []
                kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
                hidden = replace(layer, hidden, LayerCall(tuple(others), kwargs))
                length = self._tuples[id(layer)]
                return (hidden, *[None] * (length - 1)) if length else hidden

            return forward

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(replaced_forward(layer, stub(layer)))
            return self._model(**model_inputs(self._model, batch))


def few_tokens(batch: Batch) -> Batch:
    """The first tokens of a batch, without a mask, because all of them may be padding."""
    return {"input_ids": batch["input_ids"][:1, :CHECKED_TOKENS]}


def _order(
    model: PreTrainedModel, candidates: Sequence[Module], batch: Batch
) -> tuple[list[Module], dict[int, int], Tensor]:
    """Run one batch: the decoder layers in the order of their calls, their output forms, and the last output.

    The form is the length of the tuple that a layer returns, 0 if it returns a tensor.
    """
    # a layer at two places of a list is one layer that is called twice
    candidates = list(dict.fromkeys(candidates))
    order: list[Module] = []
    tuples: dict[int, int] = {}
    last: list[Tensor] = []

    def record(module: Module, _args: Any, output: Any) -> None:
        order.append(module)
        tuples[id(module)] = len(output) if isinstance(output, tuple) else 0
        last[:] = [_tensor(output)]

    with ExitStack() as stack:
        for layer in candidates:
            stack.callback(layer.register_forward_hook(record).remove)
        model(**model_inputs(model, batch))
    if sorted(map(id, order)) != sorted(map(id, candidates)):
        raise CoverageError(
            f"{type(model).__name__} calls its {len(candidates)} decoder layers {len(order)} times, but each must be "
            "called once: choose channel_metric='fisher' and reconstruct=False"
        )
    return order, tuples, last[0]


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
