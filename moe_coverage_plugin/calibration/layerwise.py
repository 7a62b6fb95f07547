"""A pass that takes all batches through one decoder layer after the other.

What an observer collects of a layer can be large, such as a matrix for every expert. In this pass it exists for one
layer at a time, and a layer can be changed before the next one sees its output. The toolkit's sequential pipeline does
the same for any traced model, but it traces the model, keeps activations in CPU memory and runs every layer twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import disable_offloading
from llmcompressor.utils.helpers import disable_cache, disable_lm_head, eval_context
from loguru import logger
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.decoder_chain import TOLERANCE, Calls, DecoderChain, few_tokens
from moe_coverage_plugin.calibration.hidden_states import moved_state
from moe_coverage_plugin.calibration.job_bar import with_progress
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.observation import Batch, decoder_layers
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import (
    GroupedExperts,
    LinearProjection,
    RaggedExperts,
    replaced_forward,
)
from moe_coverage_plugin.modeling.loaded_layers import LoadedLayers
from moe_coverage_plugin.modeling.memory import free_host_memory, free_memory
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width

# of the free memory of a device, the part that hidden states may take; layers need the rest
SHARE_OF_STATES = 0.5
# every fourth sample is held back; a calibration set of fewer samples is divided into this many parts of each sample
HELD_BACK, PARTS = 4, 8


class CurrentBatch(NamedTuple):
    """The batch that a decoder layer computes.

    Attributes:
        real_T: bool, tokens that are not padding; ``None``: all.
        held_T: bool, tokens on which what was fitted to the others is tested.
    """

    real_T: Tensor | None
    held_T: Tensor


class DecoderStep:
    """One decoder layer of the pass, and all batches before it.

    Attributes:
        decoder_layer: the layer.
        layers: the MoE layers to visit that are in it, in the order of the model.
    """

    def __init__(self, decoder_layer: Module, layers: list[MoELayer], states: _States, last: bool = False):
        self.decoder_layer, self.layers = decoder_layer, layers
        self._states, self._last = states, last
        self._finished = False
        # of the experts, if the states are what the layer outputs without them
        self._added: LayerInputs | None = None
        self.repeats = False

    @property
    def current(self) -> CurrentBatch:
        """The batch that the layer computes now, for hooks inside it."""
        return self._states.current

    def observe(
        self, changes: bool = False, hooked: bool = False, only_experts: bool = False
    ) -> list[tuple[MoELayer, LayerInputs]]:
        """Take all batches through the decoder layer and keep what its experts get.

        Args:
            changes: whether the layer will be changed before the pass goes on. Its outputs are then not kept;
                otherwise they replace its inputs, and it can be observed once.
            hooked: whether others look at values inside the layer that depend on what its experts output
                (:meth:`depends_on_experts`). Otherwise the experts of a layer that will change need not compute, if it
                is the only one.
            only_experts: whether nothing but the experts will be changed. What the layer outputs without them is then
                kept, and :meth:`finish` adds what they output, if the sum of both is the output of the layer.
        """
        states = self._states
        unused = (changes or self._last) and not hooked and len(self.layers) == 1
        adds = unused and changes and only_experts and not self._last and self._adds_experts()
        self.repeats = changes and only_experts and not self._last and not adds
        with ExitStack() as stack:
            inputs = [LayerInputs(layer.num_experts, states.tokens, states.places.inputs) for layer in self.layers]
            for layer, each in zip(self.layers, inputs, strict=True):
                forward = _zeros if unused else _experts(layer, states.on_gpu).forward
                stack.enter_context(replaced_forward(layer.experts, self._keeping(each, forward)))
            states.through(self.decoder_layer, keep=adds or not (changes or self._last))
        self._finished = not changes
        self._added = inputs[0] if adds else None
        return list(zip(self.layers, inputs, strict=True))

    def depends_on_experts(self, modules: Sequence[Module]) -> bool:
        """Whether the inputs of modules inside the layer depend on what its experts output.

        The layer computes the first batch with experts that output NaN: all that is computed from it is NaN, too.
        """
        if len(self.layers) != 1 or not modules:
            # several MoE layers compute in any case
            return len(self.layers) > 1
        found: list[Tensor] = []

        def look(_module: Module, args: tuple[Tensor, ...]) -> None:
            found.append(args[0].isnan().any())

        with ExitStack() as stack:
            stack.enter_context(replaced_forward(self.layers[0].experts, _nan))
            for module in modules:
                stack.callback(module.register_forward_pre_hook(look).remove)
            self._states.first_batch(self.decoder_layer)
        return any(map(bool, found))

    def finish(self) -> None:
        """Let the pass go on behind the layer, with what it outputs now."""
        if self._finished or self._last:
            return
        if self._added is None:
            with _grouped(self.layers, self._states.on_gpu):
                self._states.through(self.decoder_layer)
            return
        inputs, self._added = self._added, None
        self._states.add(_experts(self.layers[0], self._states.on_gpu).forward, inputs)

    def _adds_experts(self) -> bool:
        """Whether the output of the layer is what it outputs without its experts plus their outputs.

        The layer computes the first batch, as it is now, in both ways. Padding is in no inputs of experts, and inputs
        in host memory take longer to copy than attention to compute.
        """
        states, (layer,) = self._states, self.layers
        if states.padded or states.places.inputs != states.device:
            return False
        experts = _experts(layer)
        outputs: list[Tensor] = []

        def record(*args: Any, **kwargs: Any) -> Tensor:
            outputs.append(experts.forward(*args, **kwargs))
            return outputs[-1]

        with replaced_forward(layer.experts, record):
            expected = states.first_batch(self.decoder_layer)
        with replaced_forward(layer.experts, _zeros):
            others = states.first_batch(self.decoder_layer)
        if len(outputs) != 1 or outputs[0].dtype != others.dtype or outputs[0].numel() != others.numel():
            return False
        (added,) = outputs
        difference = (others + added.view_as(others)).double() - expected.double()
        return bool(difference.norm() <= TOLERANCE * added.double().norm())

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
        model: its weights are unchanged, unless ``visit`` changes them. Those that are offloaded are loaded once for
            all batches.
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
        if states.places.states != states.device:
            logger.info(
                f"{title}: hidden states are in host memory, because they need more than {SHARE_OF_STATES:.0%} of the "
                "free GPU memory"
            )
        with LoadedLayers(states.decoder_layers) as loaded:
            repeated = 0
            for index, decoder_layer in enumerate(with_progress(loaded, title, total=len(loaded), unit="layer")):
                inside = {id(module) for module in decoder_layer.modules()}
                inner = [layer for layer in layers if id(layer.moe) in inside]
                step = DecoderStep(decoder_layer, inner, states, last=index + 1 == len(loaded))
                visit(step)
                step.finish()
                repeated += step.repeats
            if repeated:
                logger.info(
                    f"{title}: {repeated} of {len(loaded)} layers computed all batches twice, because samples are "
                    "padded, inputs of experts are in host memory, or a layer does not add what its experts output"
                )


@torch.no_grad()
def check_layers(model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch]) -> None:
    """Check on a few tokens that decoder layers can be called one by one, before hours of other passes.

    Args:
        model: the model.
        layers: its MoE layers.
        batches: the calibration set, whose hidden states must fit in memory.

    Raises:
        CoverageError: see :func:`visit_layers`.
    """
    with _without_head(model):
        states = _first_states(model, layers, [few_tokens(batches[0])])
        current = [_current(index, batch, batches) for index, batch in enumerate(batches)]
        _places(states.device, *(states.token_bytes * count for count in _count_tokens(current)))


@contextmanager
def _without_head(model: PreTrainedModel) -> Iterator[None]:
    with fast_compute_dtype(model), disable_cache(model), eval_context(model), disable_lm_head(model):
        yield


def _first_states(model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch]) -> _States:
    with _grouped(layers):
        return _States(model, layers, batches)


@contextmanager
def _grouped(layers: Sequence[MoELayer], hold: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            # patch: grouped-experts
            stack.enter_context(replaced_forward(layer.experts, _experts(layer, hold).forward))
        yield


def _experts(layer: MoELayer, hold: bool = False) -> GroupedExperts | RaggedExperts:
    """The fast forward of the experts as they are now.

    Args:
        layer: the layer.
        hold: copy the weights once and not for each batch, for experts on a GPU; the copy takes as much memory.
    """
    widths = {expert_width(mlp) for mlp in layer.mlps} - {0}
    return RaggedExperts(layer) if hold or len(widths) > 1 else GroupedExperts(layer, LinearProjection)


def _nan(hidden_TH: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
    return torch.full_like(hidden_TH, torch.nan)


def _zeros(hidden_TH: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
    return torch.zeros_like(hidden_TH)


class _Places(NamedTuple):
    """Devices of the hidden states of all batches, and of the inputs of a layer's experts."""

    states: torch.device
    inputs: torch.device


class _States:
    """The hidden states of all batches before one decoder layer."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch]):
        self._chain = DecoderChain(model, decoder_layers(model, layers), batches[0])
        self.decoder_layers = self._chain.layers
        self._batches = [_current(index, batch, batches) for index, batch in enumerate(batches)]
        self.current = self._batches[0]
        positions, self.tokens = _count_tokens(self._batches)
        self._calls: list[Calls] = []
        self._hidden: list[Tensor] = []
        # so that the embedding is loaded once
        with disable_offloading():
            for batch in batches:
                hidden, calls = self._chain.first(batch)
                if not self._hidden:
                    self.device, self.token_bytes = hidden.device, hidden[0, 0].nbytes
                    self.places = _places(self.device, self.token_bytes * positions, self.token_bytes * self.tokens)
                self._hidden.append(moved_state(hidden, self.places.states))
                self._calls.append(calls)

    @property
    def on_gpu(self) -> bool:
        """Whether the model computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def padded(self) -> bool:
        """Whether any batch has padding."""
        return any(each.real_T is not None for each in self._batches)

    def first_batch(self, layer: Module) -> Tensor:
        """Take the first batch through a decoder layer; its outputs are returned, not kept."""
        self.current = self._batches[0]
        return self._chain.call(layer, self._calls[0], self._hidden[0])

    def add(self, experts: Callable[..., Tensor], inputs: LayerInputs) -> None:
        """Add to the states of all batches, none of which is padded, what experts output for their inputs."""
        sizes = [len(each.held_T) for each in self._batches]
        parts = zip(*(values.split(sizes) for values in (inputs.x_TH, inputs.ids_TK, inputs.weights_TK)), strict=True)
        for index, part in enumerate(parts):
            hidden = self._hidden[index]
            added = experts(*(each.to(inputs.device, non_blocking=True) for each in part))
            output = hidden.to(added.device, non_blocking=True) + added.view_as(hidden)
            self._hidden[index] = moved_state(output, self.places.states, hidden)

    def through(self, layer: Module, keep: bool = True) -> None:
        """Take all batches through a decoder layer; its outputs replace its inputs if they are kept."""
        for index, hidden in enumerate(self._hidden):
            self.current = self._batches[index]
            output = self._chain.call(layer, self._calls[index], hidden)
            if keep:
                self._hidden[index] = moved_state(output, self.places.states, hidden)


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


def _count_tokens(batches: Sequence[CurrentBatch]) -> tuple[int, int]:
    """Tokens of all batches, with and without padding."""
    real = sum(len(each.held_T) if each.real_T is None else int(each.real_T.sum()) for each in batches)
    return sum(len(each.held_T) for each in batches), real


def _places(device: torch.device, states: int, inputs: int) -> _Places:
    """Keep on the device what fits, the inputs of experts first, because their rows are gathered for each expert.

    Args:
        device: of the model.
        states: bytes of the hidden states of all batches.
        inputs: bytes of the inputs of a layer's experts.

    Raises:
        CoverageError: the rest does not fit in host memory.
    """
    host = torch.device("cpu")
    if device.type != "cuda":
        return _Places(device, device)
    room = SHARE_OF_STATES * free_memory(device)
    if states + inputs <= room:
        return _Places(device, device)
    places = _Places(host, device if inputs <= room else host)
    needed, free = states + (inputs if places.inputs == host else 0), free_host_memory()
    if needed > free:
        raise CoverageError(
            f"hidden states of the calibration set take {needed / 2**30:.1f} GiB of host memory, of which "
            f"{free / 2**30:.1f} GiB are free, because {room / 2**30:.1f} GiB of GPU memory may be used for them: "
            "calibrate on fewer samples or shorter ones"
        )
    return places
