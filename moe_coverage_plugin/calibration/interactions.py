"""Scores of channels under the reconstruction that follows (``obs``): the second pass, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from compressed_tensors.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.gathering import LayerSums
from moe_coverage_plugin.calibration.gram import GramObserver
from moe_coverage_plugin.calibration.layerwise import CurrentBatch, visit_layers
from moe_coverage_plugin.calibration.observation import Batch
from moe_coverage_plugin.core.obs import obs_scores, pooled_curvature
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer, projections


def interaction_scores(
    model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Batch], sums_L: Sequence[LayerSums]
) -> Tensor:
    """Scores ``[L, E, I]`` of ``obs``, float64 on the CPU.

    Args:
        model: the unpruned model.
        layers: its MoE layers.
        batches: the calibration set of this rank.
        sums_L: sums of the gradient pass, of all ranks.

    Raises:
        CoverageError: see :func:`~moe_coverage_plugin.calibration.layerwise.visit_layers`.
    """
    scorer = _Scorer({layer.name: sums.gradients for layer, sums in zip(layers, sums_L, strict=True)})
    visit_layers(model, layers, batches, scorer, "Channel interactions")
    return torch.stack([scorer.scores[layer.name] for layer in layers])


class _Scorer:
    """Collects the Gram matrices of one layer at a time and turns them into scores."""

    def __init__(self, gradients: Mapping[str, Mapping[str, Tensor]]):
        self.scores: dict[str, Tensor] = {}
        self._gradients = gradients
        self._observer: GramObserver | None = None

    def observe(self, layer: MoELayer, trace: ExpertTrace, batch: CurrentBatch) -> None:
        if self._observer is None:
            self._observer = GramObserver(layer)
        self._observer.observe(trace, torch.zeros_like(batch.held_T))

    def end_layer(self, layer: MoELayer) -> bool:
        observer, self._observer = self._observer, None
        assert observer is not None
        assert observer.layer is layer
        gram_EII = observer.grams().sum(0)
        tokens_E = observer.tokens_2E.sum(0).clamp(min=1)
        sums = self._gradients[layer.name]
        output_HH = sums["output_HH"].to(gram_EII.device)
        curvature_EII = []
        for mlp, diagonal_I in zip(layer.mlps, sums["gradient_UEI"][0], strict=True):
            with align_module_device(down := projections(mlp)["down_proj"]):
                curvature_EII.append(pooled_curvature(down.weight, output_HH, diagonal_I))
        gram_EII /= tokens_E.to(gram_EII)[:, None, None]
        self.scores[layer.name] = obs_scores(gram_EII, torch.stack(curvature_EII).to(gram_EII.device)).cpu()
        return False
