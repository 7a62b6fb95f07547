"""The calibration pass that fits the kept channels of each expert to the output of the unpruned expert."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from compressed_tensors.distributed import is_distributed
from loguru import logger
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.gram import channel_grams
from moe_coverage_plugin.calibration.layer_inputs import EXPERTS, LayerInputs
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.calibration.observation import Batch
from moe_coverage_plugin.core.reconstruction import choose_ridge, reconstruct_down
from moe_coverage_plugin.core.refit import Tokens, refit_expert
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.modeling.grouped_experts import ExpertFunction
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers, projections
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import FittedWeights, prune_experts, prune_layer, remove_expert
from moe_coverage_plugin.modifiers.kept_layers import KeptLayers, restore
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier

# tokens of each expert that a refit of gate_proj and up_proj uses
TOKENS = 4096
# experts are counted by what was fitted, and the counts are kept with each layer
COUNTED, COUNTS = ("refitted", "fitted", "unchanged"), "counts"


def reconstruct_layers(
    model: PreTrainedModel,
    layers: Sequence[MoELayer],
    kept: dict[str, list[Tensor]],
    padded_width: int | None,
    batches: Sequence[Batch],
    full: bool,
    quantizer: LayerwiseGPTQModifier | None = None,
    progress: Progress | None = None,
) -> None:
    """Fit and prune all layers, one after the other, so that later layers are fitted to the outputs of earlier ones.

    Args:
        model: the model of the run.
        layers: the layers to prune.
        kept: for each layer's name, the indices of the kept channels of every expert; each is removed once used.
        padded_width: width that experts are padded to with zeros; ``None``: not padded.
        batches: the calibration data of this rank.
        full: fit ``gate_proj`` and ``up_proj`` too.
        quantizer: quantizes each layer once it is pruned.
        progress: keeps each layer; one that it has is not fitted again.
    """
    channels = [kept_N.numpy().tobytes() for layer in layers for kept_N in kept[layer.name]]
    plan = repr((list(kept), [list(map(len, kept_E)) for kept_E in kept.values()], padded_width, full))
    finished = KeptLayers(progress, "Reconstruction", batches, [plan.encode(), *channels])
    # experts are removed before the pass, so that their tokens are already routed to the kept experts
    for layer in layers:
        for index, kept_N in enumerate(kept[layer.name]):
            if kept_N.numel() == 0 and padded_width is None:
                remove_expert(layer, index)
        mask_router(layer)
    reconstruction = _Reconstruction(kept, padded_width, full, quantizer, finished)
    visited = layers if quantizer is None else find_moe_layers(model)
    visit_layers(model, visited, batches, reconstruction.visit, "Reconstruction")
    reconstruction.report()


class _Reconstruction:
    """Fits, prunes and quantizes one decoder layer at a time."""

    def __init__(
        self,
        kept: dict[str, list[Tensor]],
        padded_width: int | None,
        full: bool,
        quantizer: LayerwiseGPTQModifier | None,
        finished: KeptLayers,
    ):
        self._kept, self._padded_width, self._full, self._quantizer = kept, padded_width, full, quantizer
        self._finished = finished
        # projections of the decoder layer that were fitted
        self._fitted: list[Module] = []
        self._counts: Counter[str] = Counter()

    def visit(self, step: DecoderStep) -> None:
        """Change a decoder layer."""
        quantizer = self._quantizer
        if quantizer is None and not step.layers:
            return
        if (tensors := self._finished.load()) is not None:
            self._restore(step, tensors)
            return
        before = self._counts.copy()
        with nullcontext() if quantizer is None else quantizer.watched(step):
            inputs = step.observe(changes=True, hooked=quantizer is not None)
        for layer, each in inputs:
            if layer.name in self._kept:
                self._change(layer, each)
            elif quantizer is not None:
                quantizer.quantize_experts(layer, each)
        if quantizer is not None:
            quantizer.quantize_others(step)
        changed = [*self._fitted, *(quantizer.quantized(step) if quantizer is not None else [])]
        counts = torch.tensor([self._counts[name] - before[name] for name in COUNTED])
        self._finished.save(step.decoder_layer, changed, {COUNTS: counts})
        self._fitted = []

    def _restore(self, step: DecoderStep, tensors: dict[str, Tensor]) -> None:
        """Make a decoder layer what an equal run has made of it."""
        self._counts.update(dict(zip(COUNTED, tensors.pop(COUNTS).tolist(), strict=True)))
        for layer in step.layers:
            if layer.name in self._kept:
                prune_layer(layer, self._kept.pop(layer.name), self._padded_width)
        restore(step.decoder_layer, tensors)
        if self._quantizer is not None:
            self._quantizer.freeze(step)

    def report(self) -> None:
        """Say what was fitted, and what was not because held-back tokens were not better for it."""
        full, down, unchanged = (self._counts[name] for name in COUNTED)
        logger.info(
            f"Reconstruction fitted all projections of {full} experts and down_proj of {down}; {unchanged} keep their "
            "weights, because tokens held back from the fit are no better with it, or too few"
        )

    def _change(self, layer: MoELayer, inputs: LayerInputs) -> None:
        kept_E = self._kept.pop(layer.name)
        channels = max(layer.widths)
        # a removed expert has no weights, and an unpruned one nothing to fit
        pruned = [index for index, kept_N in enumerate(kept_E) if 0 < kept_N.numel() < channels]
        for experts in _chunks(pruned, kept_E):
            grams_2DII = channel_grams(layer, experts, inputs)
            fits = {
                index: self._fit(layer, index, kept_E[index], grams_2II, inputs)
                for index, grams_2II in zip(experts, grams_2DII.unbind(1), strict=True)
            }
            prune_experts(layer, {index: kept_E[index] for index in experts}, self._padded_width, fits)
            self._fitted += [projections(layer.mlps[index])[name] for index, fit in fits.items() for name in fit]
            if self._quantizer is not None:
                self._quantizer.quantize_experts(layer, inputs, experts)
        others = {index: kept_N for index, kept_N in enumerate(kept_E) if index not in pruned}
        prune_experts(layer, others, self._padded_width)
        if self._quantizer is not None:
            self._quantizer.quantize_experts(layer, inputs, list(others))

    def _fit(
        self, layer: MoELayer, index: int, kept_N: Tensor, grams_2II: Tensor, inputs: LayerInputs
    ) -> FittedWeights:
        """Weights that replace those of the kept channels; none if they are no better."""
        fitted_II, held_II = grams_2II
        tokens = inputs.sample(index, TOKENS) if self._full else None
        with ExpertFunction(layer, index) as function:
            down_HI = function.projections["down_proj"].weight
            ridge = choose_ridge(down_HI, fitted_II, held_II, kept_N)
            down_HN = reconstruct_down(down_HI, fitted_II + held_II, kept_N, ridge)
            fit: FittedWeights = {} if math.isinf(ridge) else {"down_proj": down_HN}
            if tokens is not None:
                fit |= _refitted(function, kept_N.to(down_HI.device), down_HN, tokens)
        # those of one rank, because ranks may differ in the last bit; on the CPU, because they have other devices
        if is_distributed():
            fit = gather_over_ranks({name: each.cpu() for name, each in fit.items()})[0]
        self._counts["refitted" if "up_proj" in fit else "fitted" if fit else "unchanged"] += 1
        return fit


def _chunks(experts: list[int], kept_E: list[Tensor]) -> Iterator[list[int]]:
    """Split experts into those that are computed together; of equal width if possible, so that they share a batch."""
    by_width = sorted(experts, key=lambda index: kept_E[index].numel())
    for first in range(0, len(by_width), EXPERTS):
        yield by_width[first : first + EXPERTS]


def _refitted(function: ExpertFunction, kept_N: Tensor, down_HN: Tensor, tokens: Tokens) -> FittedWeights:
    """Weights of all projections of an expert; empty if a refit is no better."""
    names = [name for name in function.projections if name != "down_proj"]
    # wider than the pass if that is in 16 bits, so that the target has no rounding to be fitted
    x_MH = tokens.x_MH.to(torch.promote_types(tokens.x_MH.dtype, torch.float32))
    refit = refit_expert(
        [linear.weight[kept_N] for linear in function.inputs],
        [None if linear.bias is None else linear.bias[kept_N] for linear in function.inputs],
        down_HN,
        function.output(x_MH, bias=False),
        tokens,
        function.act,
    )
    return {} if refit is None else dict(zip(names, refit.rows, strict=True)) | {"down_proj": refit.down_HN}
