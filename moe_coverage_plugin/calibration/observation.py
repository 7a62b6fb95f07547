"""The pass over the calibration set: forward, and backward if gradients are needed.

The toolkit's own passes run experts one by one, under eager attention, without gradients and without the model's head,
and run every layer twice. This pass runs the unchanged model, with the experts of each layer grouped. If gradients are
needed, weights are frozen and only activations get gradients. The graph of one decoder layer exists at a time: the
forward pass keeps the inputs of the decoder layers, and the backward pass computes each layer again. If weights are
offloaded, groups of batches go through layer by layer (:mod:`~moe_coverage_plugin.calibration.layerwise_gradients`),
because each batch would load all layers twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from llmcompressor.utils.helpers import disable_cache, disable_lm_head, eval_context
from loguru import logger
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.decoder_chain import Batch, DecoderChain, few_tokens
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.job_bar import with_progress
from moe_coverage_plugin.calibration.kept_sums import KeptSums
from moe_coverage_plugin.calibration.layerwise_gradients import GroupObserver, observe_groups
from moe_coverage_plugin.calibration.next_token import (
    LossGradient,
    check_loss,
    drawn_tokens,
    loss_gradient,
    model_inputs,
    next_tokens,
)
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype, without_hooks
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace, grouped_experts, replaced_forward
from moe_coverage_plugin.modeling.loaded_layers import is_offloaded
from moe_coverage_plugin.modeling.moe_layers import MoELayer
from moe_coverage_plugin.modeling.repeatable_attention import repeatable_attention
from moe_coverage_plugin.options.pruning import Labels

# titles of the pass
GRADIENTS, OBSERVING = "Gradient pass", "Observing"


# patch: own-pass
def observe_batches(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    observers: Sequence[LayerObserver],
    gradients: Sequence[GradientObserver],
    labels: Labels = "text",
    progress: Progress | None = None,
) -> None:
    """Run every batch through the model and pass the values inside the experts of each layer to the observers.

    With ``gradients``, each decoder layer runs twice: without gradients for ``observers``, then, when the backward
    pass reaches it, with gradients for ``gradients``.

    Args:
        model: unchanged afterwards.
        batches: model inputs with ``input_ids``, ``attention_mask`` if padded, and ``labels`` if prompts are masked.
        observers: one for each layer.
        gradients: one for each of ``observers``, or none.
        labels: tokens whose loss is differentiated.
        progress: keeps the sums; batches whose sums it has are not run again.

    Raises:
        CoverageError: activations or the loss are not finite, or no gradient reaches an expert.
    """
    layers = [observer.layer for observer in observers]
    chain = _offloaded_chain(model, layers, batches[0]) if batches else None
    padding = _Padding()
    kept = KeptSums(progress, observers, gradients, len(batches))
    run = partial(_backward, labels=labels) if gradients else _forward
    with ExitStack() as stack:
        # first, so that the backward pass computes decoder layers again in this dtype
        stack.enter_context(fast_compute_dtype(model))
        stack.enter_context(disable_cache(model))
        stack.enter_context(eval_context(model))
        for index, observer in enumerate(observers):
            show = partial(_show, observer, gradients[index] if gradients else None)
            stack.enter_context(grouped_experts(observer.layer, show, padding.real_tokens))
            handle = observer.layer.moe.register_forward_hook(_without_grad(observer.on_output))
            stack.callback(handle.remove)
        title, left = GRADIENTS if gradients else OBSERVING, batches[kept.batches :]
        if gradients:
            stack.enter_context(_frozen(model))
            stack.enter_context(repeatable_attention())
        if chain is not None:
            shown = _group_observer(chain, observers, gradients, padding, kept)
            loss_of = partial(_loss_gradient, labels=labels) if gradients else None
            observe_groups(model, chain, left, shown, loss_of, title)
        else:
            stack.enter_context(_checkpointed(model, layers) if gradients else disable_lm_head(model))
            for batch in with_progress(left, title, total=len(batches), initial=kept.batches, unit="batch"):
                padding.enter(batch)
                tokens = run(model, batch)
                for observer in observers:
                    observer.end_batch()
                for gradient in gradients:
                    gradient.end_batch(predicted=tokens > 0)
                kept.add(1, idle=int(tokens == 0))
    if gradients and kept.idle:
        logger.warning(f"{kept.idle} of {len(batches)} batches predict no token: they add no gradients")


class _Padding:
    """The tokens of the current batch that are not padding."""

    def __init__(self) -> None:
        self._real_T: Tensor | None = None

    def enter(self, batch: Batch) -> None:
        mask_BS = batch.get("attention_mask")
        self._real_T = None if mask_BS is None or bool(mask_BS.all()) else mask_BS.bool().flatten()

    def real_tokens(self, tokens: int) -> Tensor | None:
        assert self._real_T is None or self._real_T.numel() == tokens
        return self._real_T


def _show(observer: LayerObserver, gradient: GradientObserver | None, trace: ExpertTrace) -> None:
    if not torch.is_grad_enabled():
        observer.observe(trace)
    elif gradient is not None:
        gradient.observe(trace)


def _without_grad(hook: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: None if torch.is_grad_enabled() else hook(*args)


def _offloaded_chain(model: PreTrainedModel, layers: Sequence[MoELayer], batch: Batch) -> DecoderChain | None:
    """The decoder layers, to be called one by one, if weights are offloaded."""
    candidates = decoder_layers(model, layers)
    if not is_offloaded(candidates):
        return None
    try:
        with ExitStack() as stack:
            for context in (fast_compute_dtype, disable_cache, eval_context, disable_lm_head):
                stack.enter_context(context(model))
            for layer in layers:
                stack.enter_context(grouped_experts(layer, None, lambda _tokens: None))
            with torch.no_grad():
                return DecoderChain(model, candidates, few_tokens(batch))
    except CoverageError as error:
        logger.warning(f"Each batch loads all offloaded weights, because {error}")
        return None


def _group_observer(
    chain: DecoderChain,
    observers: Sequence[LayerObserver],
    gradients: Sequence[GradientObserver],
    padding: _Padding,
    kept: KeptSums,
) -> GroupObserver:
    inside: dict[Module, list[int]] = {}
    for decoder_layer in chain.layers:
        modules = set(decoder_layer.modules())
        inside[decoder_layer] = [index for index, each in enumerate(observers) if each.layer.moe in modules]

    def observed(layer: Module) -> None:
        for index in inside[layer]:
            observers[index].end_batch()

    def differentiated(layer: Module) -> None:
        for index in inside[layer] if gradients else []:
            gradients[index].end_batch(predicted=True)

    def finished(tokens: list[int]) -> None:
        kept.add(len(tokens), idle=tokens.count(0))

    return GroupObserver(padding.enter, observed, differentiated, finished)


@torch.no_grad()
def _forward(model: PreTrainedModel, batch: Batch) -> int:
    inputs = model_inputs(model, batch)
    model(**inputs)
    return inputs["input_ids"].numel()


@torch.enable_grad()
def _backward(model: PreTrainedModel, batch: Batch, labels: Labels) -> int:
    """Forward and backward; the number of tokens predicted."""
    logits_BSV = model(**model_inputs(model, batch)).logits
    _, tokens, logits_grad_BSV = _loss_gradient(logits_BSV, batch, labels)
    if not logits_BSV.requires_grad:
        raise CoverageError(
            f"no gradient of the loss reaches the experts of {type(model).__name__}, whose layers cannot be recomputed"
            ": choose channel_metric=activation and expert_importance=first_order or second_order"
        )
    if tokens:
        torch.autograd.backward(logits_BSV, logits_grad_BSV)
    return tokens


def _loss_gradient(logits_BSV: Tensor, batch: Batch, labels: Labels) -> LossGradient:
    targets_BS = next_tokens(batch)
    if labels == "model":
        # the same draws for the same batch, in each run and on any rank
        seed = zlib.crc32(batch["input_ids"].cpu().numpy().tobytes())
        targets_BS = drawn_tokens(logits_BSV, targets_BS, torch.Generator(logits_BSV.device).manual_seed(seed))
    gradient = loss_gradient(logits_BSV, targets_BS)
    check_loss(gradient.loss)
    return gradient


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Compute no gradients of weights."""
    with ExitStack() as stack:
        # reading an offloaded weight copies it
        with disable_onloading():
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        yield


@contextmanager
def _checkpointed(model: PreTrainedModel, layers: Sequence[MoELayer]) -> Iterator[None]:
    """Compute gradients of activations from the embeddings on, one decoder layer's graph at a time."""

    def begin(_module: Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    with ExitStack() as stack:
        stack.callback(model.get_input_embeddings().register_forward_hook(begin).remove)
        for layer in decoder_layers(model, layers):
            forward = partial(_recomputed, without_hooks(layer, layer.forward))
            stack.enter_context(replaced_forward(layer, forward))
        yield


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # reentrant: its first run is without gradients, which tells observers the two runs apart
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True, preserve_rng_state=False)


def decoder_layers(model: Module, layers: Sequence[MoELayer]) -> list[Module]:
    """All decoder layers of the lists that contain the MoE layers, dense ones included."""
    lists: dict[str, ModuleList] = {}
    for layer in layers:
        path = layer.name.split(".")
        for depth in range(1, len(path)):
            name = ".".join(path[:depth])
            if isinstance(module := model.get_submodule(name), ModuleList):
                lists[name] = module
                break
    return [layer for layers in lists.values() for layer in layers]
