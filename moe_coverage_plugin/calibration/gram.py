"""Gram matrices of the channels of every expert, from which ``down_proj`` is reconstructed."""

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
    """Running Gram matrices of one layer, ``sum_t g^2 A A^T`` over each expert's routed tokens without padding.

    They take ``E * I * I * 4`` bytes on the device of the experts, so an observer is deleted as soon as its layer has
    computed every batch.
    """

    def __init__(self, layer: MoELayer):
        self.layer = layer
        self.has_batches = False
        self._grams: dict[int, Tensor] = {}

    def observe(self, trace: ExpertTrace) -> None:
        """Add a batch."""
        self.has_batches = True
        routing = trace.routing
        lengths = routing.real_lengths_E.tolist()
        activations = routing.real(trace.a_MI).split(lengths)
        gates = routing.real(routing.routing_weights_M).split(lengths)
        for index, (a_MI, routing_weights_M) in enumerate(zip(activations, gates, strict=True)):
            if routing_weights_M.numel():
                added_II = gram(a_MI, routing_weights_M)
                self._grams[index] = self._grams[index].add_(added_II) if index in self._grams else added_II

    def grams(self) -> Mapping[int, Tensor]:
        """Gram matrices ``[I, I]`` by expert, summed over all ranks; experts without tokens have none.

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
