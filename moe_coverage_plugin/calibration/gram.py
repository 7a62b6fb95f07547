"""Collects what the reconstruction of ``down_proj`` needs: Gram matrices of the channels of every expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.observer import non_finite_activations
from moe_coverage_plugin.core.reconstruction import gram
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer


class GramObserver:
    """Running Gram matrices of one layer, ``sum_t g^2 A A^T`` over the routed and real tokens of each expert.

    They take ``E * I * I * 4`` bytes where the experts compute, so an observer is read and dropped as soon as its
    layer has seen every batch.
    """

    def __init__(self, layer: MoELayer):
        self.layer = layer
        self.began = False
        self._grams: dict[int, Tensor] = {}

    def observe(self, trace: ExpertTrace) -> None:
        """What the experts computed for a batch."""
        self.began = True
        routing = trace.routing
        lengths = routing.real_lengths_E.tolist()
        activations = routing.real(trace.a_MI).split(lengths)
        gates = routing.real(routing.routing_weights_M).split(lengths)
        for index, (a_MI, routing_weights_M) in enumerate(zip(activations, gates, strict=True)):
            if routing_weights_M.numel():
                added_II = gram(a_MI, routing_weights_M)
                self._grams[index] = self._grams[index].add_(added_II) if index in self._grams else added_II

    def grams(self) -> Mapping[int, Tensor]:
        """Gram matrices ``[I, I]`` by expert, those of all ranks added; experts that no token reached have none.

        Raises:
            CoverageError: activations that are NaN or infinite.
        """
        if torch.distributed.is_initialized():
            channels = max(self.layer.widths)
            zeros_II = torch.zeros(channels, channels)
            every = {str(index): self._grams.get(index, zeros_II).cpu() for index in range(self.layer.num_experts)}
            self._grams = {int(index): total for index, total in sum_over_ranks(every).items() if bool(total.any())}
        for index, gram_II in self._grams.items():
            if not bool(torch.isfinite(gram_II).all()):
                raise non_finite_activations(f"{self.layer.name} expert {index}")
        return self._grams
