"""A pass that takes all batches through one decoder layer after the other.

What an observer collects of a layer can be large, such as a matrix for every expert. In this pass it exists for one
layer at a time, and a layer can be changed before the next one sees its output. The toolkit's sequential pipeline does
the same for any traced model, but it traces the model, keeps activations in CPU memory and runs every layer twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import get_execution_device
from llmcompressor.utils.helpers import disable_cache, disable_lm_head, eval_context
from torch import Tensor
from torch.nn import Module
from tqdm import tqdm
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.next_token import model_inputs
from moe_coverage_plugin.calibration.observation import Batch, decoder_layers
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import (
    GroupedExperts,
    LinearProjection,
    RaggedExperts,
    replaced_forward,
)
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width

# of the free memory of a device, the part that hidden states may take; layers need the rest
SHARE_OF_STATES = 0.5
# every fourth sample is held back; a calibration set of fewer samples is divided into this many parts of each sample
HELD_BACK, PARTS = 4, 8
# of the first sample, when layers are checked before other passes
CHECKED_TOKENS = 8
# of the norm of hidden states: far above the rounding of bfloat16 sums in another order, far below a wrong argument
TOLERANCE = 0.05


class CurrentBatch(NamedTuple):
    """The batch that a decoder layer computes.

    Attributes:
        real_T: bool, tokens that are not padding; ``None``: all.
        held_T: bool, tokens on which what was fitted to the others is tested.
    """

    real_T: Tensor | None
    held_T: Tensor


class _Call(NamedTuple):
    """Arguments of a decoder layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class DecoderStep:
    """One decoder layer of the pass, and all batches before it.

    Attributes:
        decoder_layer: the layer.
        layers: the MoE layers to visit that are in it, in the order of the model.
    """

    def __init__(self, decoder_layer: Module, layers: list[MoELayer], states: _States):
        self.decoder_layer, self.layers = decoder_layer, layers
        self._states = states
        self._outputs: list[Tensor] | None = None

    @property
    def current(self) -> CurrentBatch:
        """The batch that the layer computes now, for hooks inside it."""
        return self._states.current

    def observe(self, changes: bool = False, hooked: bool = False) -> list[tuple[MoELayer, LayerInputs]]:
        """Take all batches through the decoder layer and keep what its experts get.

        Args:
            changes: whether the layer will be changed before the pass goes on. Its outputs are then not kept.
            hooked: whether others look at values inside the layer, which may depend on what its experts output.
                Otherwise the experts of a layer that will change need not compute, if it is the only one.
        """
        states = self._states
        with ExitStack() as stack:
            inputs = [LayerInputs(layer.num_experts, states.tokens, states.store) for layer in self.layers]
            for layer, each in zip(self.layers, inputs, strict=True):
                unused = changes and not hooked and len(self.layers) == 1
                forward = _zeros if unused else _experts(layer).forward
                stack.enter_context(replaced_forward(layer.experts, self._keeping(each, forward)))
            outputs = states.through(self.decoder_layer, keep=not changes)
        self._outputs = None if changes else outputs
        return list(zip(self.layers, inputs, strict=True))

    def finish(self) -> None:
        """Let the pass go on behind the layer, with what it outputs now."""
        if self._outputs is None:
            with _grouped(self.layers):
                self._outputs = self._states.through(self.decoder_layer)
        self._states.advance(self._outputs)

    def _keeping(self, inputs: LayerInputs, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            batch = self.current
            inputs.add(hidden_states, top_k_index, top_k_weights, batch.held_T, batch.real_T)
            return forward(hidden_states, top_k_index, top_k_weights)

        return keep


@torch.no_grad()
def visit_layers(
    model: PreTrainedModel,
    layers: Sequence[MoELayer],
    batches: Sequence[Batch],
    visit: Callable[[DecoderStep], None],
    title: str,
) -> None:
    """Take all batches through the decoder layers, one layer after the other.

    Args:
        model: its weights are unchanged, unless ``visit`` changes them.
        layers: the MoE layers to visit.
        batches: the calibration set.
        visit: called for each decoder layer, dense ones included, in the order of the model. It may observe the layer
            and change it; the next layer gets the outputs of the changed one.
        title: of the progress bar.

    Raises:
        CoverageError: the model's decoder layers cannot be called one by one.
    """
    with _without_head(model):
        states = _first_states(model, layers, batches)
        for decoder_layer in tqdm(states.decoder_layers, desc=title, unit="layer"):
            inside = {id(module) for module in decoder_layer.modules()}
            step = DecoderStep(decoder_layer, [layer for layer in layers if id(layer.moe) in inside], states)
            visit(step)
            step.finish()


@torch.no_grad()
def check_layers(model: PreTrainedModel, layers: Sequence[MoELayer], batch: Batch) -> None:
    """Check on a few tokens that decoder layers can be called one by one, before hours of other passes.

    Args:
        model: the model.
        layers: its MoE layers.
        batch: of the calibration set.

    Raises:
        CoverageError: see :func:`visit_layers`.
    """
    # without a mask, because all of the first tokens may be padding
    few = {"input_ids": batch["input_ids"][:1, :CHECKED_TOKENS]}
    with _without_head(model):
        _first_states(model, layers, [few])


@contextmanager
def _without_head(model: PreTrainedModel) -> Iterator[None]:
    with fast_compute_dtype(model), disable_cache(model), eval_context(model), disable_lm_head(model):
        yield


def _first_states(model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch]) -> _States:
    with _grouped(layers):
        return _States(model, layers, batches)


@contextmanager
def _grouped(layers: Sequence[MoELayer]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            # patch: grouped-experts
            stack.enter_context(replaced_forward(layer.experts, _experts(layer).forward))
        yield


def _experts(layer: MoELayer) -> GroupedExperts | RaggedExperts:
    """The fast forward of the experts as they are now."""
    widths = {expert_width(mlp) for mlp in layer.mlps} - {0}
    return GroupedExperts(layer, LinearProjection) if len(widths) == 1 else RaggedExperts(layer)


def _zeros(hidden_TH: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
    return torch.zeros_like(hidden_TH)


class _States:
    """The hidden states of all batches before one decoder layer."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch]):
        candidates = decoder_layers(model, layers)
        self.decoder_layers, tuples, expected = _order(model, candidates, batches[0])
        self._batches = [_current(index, batch, batches) for index, batch in enumerate(batches)]
        self._calls: list[dict[int, _Call]] = []
        self.current = self._batches[0]
        hidden = []
        for batch in batches:
            state, calls = _first_state(model, self.decoder_layers, tuples, batch)
            hidden.append(state)
            self._calls.append(calls)
        self.store = _store_device(hidden)
        # of all batches, without padding
        self.tokens = sum(
            len(each.held_T) if each.real_T is None else int(each.real_T.sum()) for each in self._batches
        )
        self._hidden = [each.to(self.store) for each in hidden]
        self._check(model, expected)

    def _check(self, model: PreTrainedModel, expected: Tensor) -> None:
        """Compare layer by layer with the model's own forward, on the first batch."""
        state = self._hidden[0]
        for layer in self.decoder_layers:
            state = self._call(layer, 0, state)
        difference = float((state.double() - expected.to(state.device).double()).norm())
        # observers name the expert if hidden states are not finite
        if bool(torch.isfinite(expected).all()) and not difference <= TOLERANCE * float(expected.double().norm()):
            raise CoverageError(
                f"the decoder layers of {type(model).__name__}, called one by one, differ from the model by "
                f"{difference / float(expected.double().norm()):.0%}, above {TOLERANCE:.0%}: choose "
                "channel_metric='fisher' and reconstruct=False"
            )

    def through(self, layer: Module, keep: bool = True) -> list[Tensor]:
        """The outputs of a decoder layer for all batches; none if they are not kept."""
        outputs = (self._call(layer, index, hidden) for index, hidden in enumerate(self._hidden))
        return [each.to(self.store) for each in outputs if keep]

    def advance(self, outputs: list[Tensor]) -> None:
        """Continue behind the layer."""
        self._hidden = outputs

    def _call(self, layer: Module, index: int, hidden: Tensor) -> Tensor:
        self.current = self._batches[index]
        call = self._calls[index][id(layer)]
        device = get_execution_device(layer)
        # a copy, because a layer may write into its input, which passes the layer twice
        output = layer(hidden.to(device, copy=True), *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output


def _current(index: int, batch: Batch, batches: Sequence[Batch]) -> CurrentBatch:
    mask_BS = batch.get("attention_mask")
    samples, length = batch["input_ids"].shape
    parts_BS = torch.arange(samples)[:, None] + sum(len(each["input_ids"]) for each in batches[:index])
    if sum(len(each["input_ids"]) for each in batches) < PARTS:
        # padding is in no part, otherwise the last parts of short samples would have no tokens
        real_BS = torch.ones(samples, length, dtype=torch.bool) if mask_BS is None else mask_BS.bool().cpu()
        parts_BS = (real_BS.cumsum(1) - 1) * PARTS // real_BS.sum(1, keepdim=True).clamp(min=1)
    held_T = (parts_BS % HELD_BACK == HELD_BACK - 1).expand(samples, length).flatten()
    real_T = None if mask_BS is None or bool(mask_BS.all()) else mask_BS.bool().flatten()
    return CurrentBatch(real_T, held_T)


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
        last[:] = [output[0] if isinstance(output, tuple) else output]

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


def _first_state(
    model: PreTrainedModel, layers: Sequence[Module], tuples: Mapping[int, int], batch: Batch
) -> tuple[Tensor, dict[int, _Call]]:
    """The input of the first decoder layer, and the other arguments of all: no decoder layer computes anything."""
    calls: dict[int, _Call] = {}
    first: list[Tensor] = []

    def stub(layer: Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                hidden, *others = args
            else:
                hidden, others = kwargs["hidden_states"], []
            kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            calls[id(layer)] = _Call(tuple(others), kwargs)
            first.append(hidden)
            length = tuples[id(layer)]
            return (hidden, *[None] * (length - 1)) if length else hidden

        return forward

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced_forward(layer, stub(layer)))
        model(**model_inputs(model, batch))
    return first[0], calls


def _store_device(hidden: Sequence[Tensor]) -> torch.device:
    """The device of the hidden states: that of the model if there is room, otherwise the CPU."""
    device = hidden[0].device
    if device.type != "cuda":
        return device
    # those before a layer, those behind it and the inputs of its experts exist at the same time
    needed = 3 * sum(each.nbytes for each in hidden)
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed <= SHARE_OF_STATES * (free + sum(each.nbytes for each in hidden)) else torch.device("cpu")
