"""The calibration pass that fits the kept channels of each expert to the output of the unpruned expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, pairwise

import torch
from compressed_tensors.distributed import is_distributed
from loguru import logger
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.gram import channel_grams
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.calibration.observation import Batch
from moe_coverage_plugin.core.gauss_newton import Problem, Tokens, Weights
from moe_coverage_plugin.core.reconstruction import choose_ridge, reconstruct_down
from moe_coverage_plugin.core.refit import FEWEST_TOKENS, Refit, refit, token_bytes
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.modeling.grouped_experts import ExpertFunction, down_weights
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width, find_moe_layers, projections
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import FittedWeights, prune_experts, prune_layer, remove_expert
from moe_coverage_plugin.modifiers.kept_layers import KeptLayers, restore
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier

# of the pass, and its cost in forward passes over the calibration set
TITLE, COST, COST_WITH_QUANTIZER = "Reconstruction", 4.0, 6.0
# experts whose gate_proj and up_proj are refitted together
REFITTED = 8
# memory of their tokens, outputs and activations; as many tokens as fit are used, since more of them fit better
REFIT_BYTES = 5e9
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
    finished = KeptLayers(progress, TITLE, batches, [plan.encode(), *channels])
    # experts are removed before the pass, so that their tokens are already routed to the kept experts
    for layer in layers:
        for index, kept_N in enumerate(kept[layer.name]):
            if kept_N.numel() == 0 and padded_width is None:
                remove_expert(layer, index)
        mask_router(layer)
    reconstruction = _Reconstruction(kept, padded_width, full, quantizer, finished)
    visited = layers if quantizer is None else find_moe_layers(model)
    visit_layers(model, visited, batches, reconstruction.visit, TITLE)
    finished.finish()
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
        changes_others = quantizer is not None and quantizer.changes_others(step)
        if not step.layers and not changes_others:
            return
        if (tensors := self._finished.load()) is not None:
            self._restore(step, tensors)
            return
        before = self._counts.copy()
        with nullcontext(False) if quantizer is None else quantizer.watched(step) as hooked:
            inputs = step.observe(changes=True, hooked=hooked, only_experts=not changes_others)
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
        for experts in _chunks(pruned, kept_E, inputs.experts_together):
            kept_EN = torch.stack([kept_E[index] for index in experts]).to(inputs.device)
            fits = self._fit(layer, experts, kept_EN, channel_grams(layer, experts, inputs), inputs)
            prune_experts(layer, {index: kept_E[index] for index in experts}, self._padded_width, fits)
            self._fitted += [projections(layer.mlps[index])[name] for index, fit in fits.items() for name in fit]
            if self._quantizer is not None:
                self._quantizer.quantize_experts(layer, inputs, experts)
        others = {index: kept_N for index, kept_N in enumerate(kept_E) if index not in pruned}
        prune_experts(layer, others, self._padded_width)
        if self._quantizer is not None:
            self._quantizer.quantize_experts(layer, inputs, list(others))

    def _fit(
        self, layer: MoELayer, experts: list[int], kept_EN: Tensor, grams_2EII: Tensor, inputs: LayerInputs
    ) -> dict[int, FittedWeights]:
        """Weights that replace those of the kept channels of experts of one width; none for those not better."""
        fitted_EII, held_EII = grams_2EII
        down_EHI = down_weights(layer, experts)
        ridge_E = choose_ridge(down_EHI, fitted_EII, held_EII, kept_EN)
        down_EHN = reconstruct_down(down_EHI, fitted_EII.add_(held_EII), kept_EN, ridge_E)
        parts = _parts(experts, REFITTED) if self._full else ()
        refits = [_refit(layer, experts[part], kept_EN[part], down_EHN[part], inputs) for part in parts]
        names = [name for name in projections(layer.mlps[experts[0]]) if name != "down_proj"]
        refitted = [each for refit in refits for each in zip(refit.rows_EOH, refit.down_EHN, strict=True)]
        # all that is read from the device, at once
        better_E = torch.cat([refit.better_E for refit in refits]).tolist() if refits else [False] * len(experts)
        fits: dict[int, FittedWeights] = {}
        for position, (index, fitted, better) in enumerate(
            zip(experts, ridge_E.isfinite().tolist(), better_E, strict=True)
        ):
            fits[index] = {"down_proj": down_EHN[position]} if fitted else {}
            if better:
                rows_OH, down_HN = refitted[position]
                rows = rows_OH.split(kept_EN.shape[1])
                fits[index] = dict(zip(names, rows, strict=True)) | {"down_proj": down_HN}
            # those of one rank, because ranks may differ in the last bit; on the CPU, as they have other devices
            if is_distributed():
                fits[index] = gather_over_ranks({name: each.cpu() for name, each in fits[index].items()})[0]
            fit = fits[index]
            self._counts["refitted" if "up_proj" in fit else "fitted" if fit else "unchanged"] += 1
        return fits


def _chunks(experts: list[int], kept_E: list[Tensor], most: int) -> Iterator[list[int]]:
    """Split experts into those that are computed together, all of one width and at most ``most``."""

    def width(index: int) -> int:
        return kept_E[index].numel()

    for _, group in groupby(sorted(experts, key=width), width):
        same = list(group)
        for part in _parts(same, most):
            yield same[part]


def _refit(layer: MoELayer, experts: list[int], kept_EN: Tensor, down_EHN: Tensor, inputs: LayerInputs) -> Refit:
    """Refit all projections of experts of one width."""
    weights = _kept_weights(layer, experts, kept_EN, down_EHN)
    each = token_bytes(inputs.x_TH.shape[1], expert_width(layer.mlps[experts[0]]), inputs.x_TH.dtype)
    fitted, held = inputs.sample(experts, int(REFIT_BYTES / REFITTED / each))
    # otherwise none of the experts has enough
    if min(fitted.x_EMH.shape[1], held.x_EMH.shape[1]) < FEWEST_TOKENS:
        return Refit(weights.rows_EOH, down_EHN, torch.zeros(len(experts), dtype=torch.bool, device=down_EHN.device))
    act = ExpertFunction(layer, experts[0]).act
    return refit(weights, _problem(layer, experts, fitted), _problem(layer, experts, held), act)


def _parts(experts: Sequence[int], most: int) -> list[slice]:
    """As few parts of at most ``most`` experts as there can be, of about the same size."""
    count = -(-len(experts) // most)
    bounds = [len(experts) * number // count for number in range(count + 1)] if count else []
    return [slice(*each) for each in pairwise(bounds)]


def _kept_weights(layer: MoELayer, experts: Sequence[int], kept_EN: Tensor, down_EHN: Tensor) -> Weights:
    rows, biases = [], []
    for kept_N, index in zip(kept_EN, experts, strict=True):
        with ExpertFunction(layer, index) as function:
            rows.append(torch.cat([linear.weight[kept_N] for linear in function.inputs]))
            found = [None if linear.bias is None else linear.bias[kept_N] for linear in function.inputs]
            if any(each is not None for each in found):
                zeros_N = rows[-1].new_zeros(len(kept_N))
                biases.append(torch.cat([zeros_N if each is None else each for each in found]))
    return Weights(torch.stack(rows), torch.stack(biases) if biases else None, down_EHN)


def _problem(layer: MoELayer, experts: Sequence[int], tokens: Tokens) -> Problem:
    """Tokens of experts, and what the unpruned experts output for them."""
    # wider than a pass in 16 bits, so that the target has no rounding to be fitted
    dtype = torch.promote_types(tokens.x_EMH.dtype, torch.float32)
    target_EMH = torch.empty_like(tokens.x_EMH, dtype=dtype)
    for target_MH, x_MH, index in zip(target_EMH, tokens.x_EMH, experts, strict=True):
        with ExpertFunction(layer, index) as function:
            target_MH[:] = function.wide_output(x_MH)
    return Problem(tokens, target_EMH)
