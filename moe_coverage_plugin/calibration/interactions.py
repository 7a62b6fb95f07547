"""Scores of channels under the reconstruction that follows (``obs``): the second pass, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.gathering import LayerSums
from moe_coverage_plugin.calibration.gram import channel_grams
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.calibration.observation import Batch
from moe_coverage_plugin.core.obs import obs_scores, pooled_curvature
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.modeling.grouped_experts import down_weights
from moe_coverage_plugin.modeling.memory import free_memory
from moe_coverage_plugin.modeling.moe_layers import MoELayer, uniform_shape

# of the pass, and its cost in forward passes over the calibration set
TITLE, COST = "Channel interactions", 1.5
# experts that are scored together at least: each step of obs takes a few small products, which one more expert hardly
# slows; on a GPU, as many more as take these bytes, if they are not more than this part of its free memory
SCORED, BYTES, SHARE = 64, 6.5e9, 0.5
# float64 matrices of an expert at the peak of obs_scores, with the sums that it gets
MATRICES = 7
# name of what is kept of a layer, before the name of the layer
SCORES = "interactions"


def interaction_scores(
    model: PreTrainedModel,
    layers: Sequence[MoELayer],
    batches: Sequence[Batch],
    sums_L: Sequence[LayerSums],
    progress: Progress | None = None,
) -> Tensor:
    """Scores ``[L, E, I]`` of ``obs``, float64 on the CPU.

    Args:
        model: the unpruned model.
        layers: its MoE layers.
        batches: the calibration set of this rank.
        sums_L: sums of the gradient pass, of all ranks.
        progress: keeps the scores of each layer; a layer whose scores it has is not observed again.

    Raises:
        CoverageError: see :func:`~moe_coverage_plugin.calibration.layerwise.visit_layers`.
    """
    scores = {} if progress is None else _kept_scores(progress, layers)
    gradients = {layer.name: sums.gradients for layer, sums in zip(layers, sums_L, strict=True)}

    def score(step: DecoderStep) -> None:
        if all(layer.name in scores for layer in step.layers):
            return
        for layer, inputs in step.observe():
            tokens_E = inputs.count_tokens()
            chunks = torch.arange(layer.num_experts).split(_scored_together(layer, inputs.device))
            parts = [_scores_of(layer, each.tolist(), inputs, tokens_E, gradients[layer.name]) for each in chunks]
            scores[layer.name] = torch.cat(parts)
            if progress is not None:
                progress.save(f"{SCORES}.{layer.name}", {"scores_EI": scores[layer.name]})

    visit_layers(model, layers, batches, score, TITLE)
    return torch.stack([scores[layer.name] for layer in layers])


def _scored_together(layer: MoELayer, device: torch.device) -> int:
    if device.type == "cpu":
        return SCORED
    _, channels = uniform_shape([layer])
    # not as many as fit: products of other numbers of matrices may be rounded in another order
    return max(SCORED, int(min(BYTES, SHARE * free_memory(device)) // matrix_bytes(channels)))


def matrix_bytes(channels: int) -> int:
    """Bytes of the matrices of an expert while it is scored."""
    return 8 * MATRICES * channels**2


def _kept_scores(progress: Progress, layers: Sequence[MoELayer]) -> dict[str, Tensor]:
    found = {layer.name: progress.load(f"{SCORES}.{layer.name}") for layer in layers}
    scores = {name: tensors["scores_EI"] for name, tensors in found.items() if tensors is not None}
    if scores:
        logger.info(f"Going on with the scores of {len(scores)} of {len(layers)} layers")
    return scores


def _scores_of(
    layer: MoELayer, experts: list[int], inputs: LayerInputs, tokens_E: Tensor, sums: Mapping[str, Tensor]
) -> Tensor:
    gram_DII = channel_grams(layer, experts, inputs).sum(0)
    gram_DII /= tokens_E[experts].clamp(min=1).to(gram_DII)[:, None, None]
    output_HH = sums["output_HH"].to(gram_DII.device)
    # the copy of the weights is released before the scores need their memory
    curvature_DII = pooled_curvature(down_weights(layer, experts), output_HH, sums["gradient_UEI"][0][experts])
    return obs_scores(gram_DII, curvature_DII).cpu()
