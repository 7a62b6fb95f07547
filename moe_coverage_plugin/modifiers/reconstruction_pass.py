"""The calibration pass that fits the kept channels of each expert to the output of the unpruned expert."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.distributed import is_distributed
from compressed_tensors.utils import align_module_device
from loguru import logger
from torch import Tensor
from torch.nn import Linear, functional
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.gram import GramObserver
from moe_coverage_plugin.calibration.layerwise import CurrentBatch, visit_layers
from moe_coverage_plugin.calibration.observation import Batch
from moe_coverage_plugin.calibration.token_sample import TokenSample
from moe_coverage_plugin.core.reconstruction import choose_ridge, reconstruct_down
from moe_coverage_plugin.core.refit import Activation, refit_expert
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer, projections
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import FittedWeights, prune_layer, remove_expert

# tokens of each expert that a refit of gate_proj and up_proj uses
TOKENS = 4096


def reconstruct_layers(
    model: PreTrainedModel,
    layers: Sequence[MoELayer],
    kept: dict[str, list[Tensor]],
    padded_width: int | None,
    batches: Sequence[Batch],
    full: bool,
) -> None:
    """Fit and prune all layers, one after the other, so that later layers are fitted to the outputs of earlier ones.

    Args:
        model: the model of the run.
        layers: the layers to prune.
        kept: for each layer's name, the indices of the kept channels of every expert; each is removed once used.
        padded_width: width that experts are padded to with zeros; ``None``: not padded.
        batches: the calibration data of this rank.
        full: fit ``gate_proj`` and ``up_proj`` too.
    """
    # experts are removed before the pass, so that their tokens are already routed to the kept experts
    for layer in layers:
        for index, kept_N in enumerate(kept[layer.name]):
            if kept_N.numel() == 0 and padded_width is None:
                remove_expert(layer, index)
        mask_router(layer)
    reconstruction = _Reconstruction(kept, padded_width, full, sum(gather_over_ranks(len(batches))))
    visit_layers(model, layers, batches, reconstruction, "Reconstruction")
    reconstruction.report()


class _Reconstruction:
    """Observes, fits and prunes one layer at a time."""

    def __init__(self, kept: dict[str, list[Tensor]], padded_width: int | None, full: bool, batches: int):
        self._kept, self._padded_width, self._full, self._batches = kept, padded_width, full, batches
        self._observers: tuple[GramObserver, TokenSample] | None = None
        self._counts: Counter[str] = Counter()

    def observe(self, layer: MoELayer, trace: ExpertTrace, batch: CurrentBatch) -> None:
        if self._observers is None:
            self._observers = GramObserver(layer), TokenSample(layer, TOKENS, self._batches)
        gram, sample = self._observers
        gram.observe(trace, batch.held_T)
        if self._full:
            sample.observe(trace, batch.held_T)

    def end_layer(self, layer: MoELayer) -> bool:
        kept_E = self._kept.pop(layer.name)
        assert self._observers is not None
        gram, sample = self._observers
        self._observers = None
        fitted_EII, held_EII = gram.grams()
        fits: dict[int, FittedWeights] = {}
        ranks = is_distributed()
        for index, (mlp, kept_N) in enumerate(zip(layer.mlps, kept_E, strict=True)):
            # a removed expert has no weights, and an unpruned one nothing to fit
            if not 0 < kept_N.numel() < fitted_EII.shape[-1]:
                continue
            tokens = sample.tokens(index) if self._full else None
            with align_module_device(mlp):
                parts = projections(mlp)
                down_HI = parts["down_proj"].weight
                ridge = choose_ridge(down_HI, fitted_EII[index], held_EII[index], kept_N)
                down_HN = reconstruct_down(down_HI, fitted_EII[index] + held_EII[index], kept_N, ridge)
                fit: FittedWeights = {} if math.isinf(ridge) else {"down_proj": down_HN}
                if tokens is not None:
                    fit |= _refitted(layer, parts, kept_N.to(down_HI.device), down_HN, tokens)
            # those of one rank, because ranks may differ in the last bit; on the CPU, because they have other devices
            if ranks:
                fit = gather_over_ranks({name: each.cpu() for name, each in fit.items()})[0]
            fits[index] = fit
            self._counts["refitted" if "up_proj" in fit else "fitted" if fit else "unchanged"] += 1
        prune_layer(layer, kept_E, self._padded_width, fits)
        return True

    def report(self) -> None:
        """Say what was fitted, and what was not because held-back tokens were not better for it."""
        full, down, unchanged = (self._counts[name] for name in ("refitted", "fitted", "unchanged"))
        logger.info(
            f"Reconstruction fitted all projections of {full} experts and down_proj of {down}; {unchanged} keep their "
            "weights, because tokens held back from the fit are no better with it, or too few"
        )


def _refitted(layer: MoELayer, parts: Any, kept_N: Tensor, down_HN: Tensor, tokens: Any) -> FittedWeights:
    """Weights of all projections of an expert; empty if a refit is no better."""
    container: Any = layer.experts
    names = [name for name in ("gate_proj", "up_proj") if name in parts]
    act: Activation = container._apply_gate if len(names) == 2 else container.act_fn
    linears = [parts[name] for name in names]
    # wider than the pass if that is in 16 bits, so that the target has no rounding to be fitted
    x_MH = tokens.x_MH.to(torch.promote_types(tokens.x_MH.dtype, torch.float32))
    a_MI = act(torch.cat([_project(x_MH, linear) for linear in linears], dim=-1))
    refit = refit_expert(
        [linear.weight[kept_N] for linear in linears],
        [None if linear.bias is None else linear.bias[kept_N] for linear in linears],
        down_HN,
        a_MI @ parts["down_proj"].weight.T.to(a_MI.dtype),
        tokens,
        act,
    )
    return {} if refit is None else dict(zip(names, refit.rows, strict=True)) | {"down_proj": refit.down_HN}


def _project(x_MH: Tensor, linear: Linear) -> Tensor:
    """Output of a linear layer in the dtype of its input."""
    bias_O = None if linear.bias is None else linear.bias.to(x_MH.dtype)
    return functional.linear(x_MH, linear.weight.to(x_MH.dtype), bias_O)
