"""Collects what the reconstruction of ``down_proj`` needs: Gram matrices of the channels of every expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock
from moe_coverage_plugin.calibration.observer import non_finite_activations
from moe_coverage_plugin.calibration.traced_experts import ExpertTrace
from moe_coverage_plugin.core.reconstruction import gram


class GramObserver:
    """Running Gram matrices of one block, ``sum_t g^2 A A^T`` over the routed and real tokens of each expert.

    They take ``E * I * I * 4`` bytes where the experts compute, so an observer is read and dropped as soon as its
    block has seen every batch.
    """

    def __init__(self, block: ExpertBlock):
        self.block = block
        self.began = False
        self._grams: dict[int, Tensor] = {}

    def observe(self, trace: ExpertTrace) -> None:
        """What the experts computed for a batch."""
        self.began = True
        routing = trace.routing
        lengths = routing.real_lengths_E.tolist()
        activations = routing.real(trace.a_MI).split(lengths)
        gates = routing.real(routing.gates_M).split(lengths)
        for index, (a_NI, gates_N) in enumerate(zip(activations, gates, strict=True)):
            if gates_N.numel():
                added_II = gram(a_NI, gates_N)
                self._grams[index] = self._grams[index].add_(added_II) if index in self._grams else added_II

    def grams(self) -> Mapping[int, Tensor]:
        """Gram matrices ``[I, I]`` by expert, those of all ranks added; experts that no token reached have none.

        Raises:
            CoverageError: activations that are NaN or infinite.
        """
        if torch.distributed.is_initialized():
            channels = max(self.block.widths)
            zeros_II = torch.zeros(channels, channels)
            every = {str(index): self._grams.get(index, zeros_II).cpu() for index in range(self.block.num_experts)}
            self._grams = {int(index): total for index, total in sum_over_ranks(every).items() if bool(total.any())}
        for index, gram_II in self._grams.items():
            if not bool(torch.isfinite(gram_II).all()):
                raise non_finite_activations(f"{self.block.name} expert {index}")
        return self._grams
