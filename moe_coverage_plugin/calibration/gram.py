"""Gram matrices of the channels of every expert, from which ``down_proj`` is reconstructed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.observer import non_finite_activations
from moe_coverage_plugin.core.reconstruction import gram
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer


class GramObserver:
    """Running Gram matrices of one layer, ``sum_t g^2 A A^T`` over each expert's routed tokens without padding.

    Tokens are in two parts: those that a fit may use, and those held back to test it. The matrices take
    ``2 * E * I * I * 4`` bytes on the device of the experts, so an observer is deleted as soon as its layer has
    computed every batch.
    """

    def __init__(self, layer: MoELayer):
        """Create an observer without sums."""
        self.layer = layer
        self.tokens_2E = torch.zeros(2, layer.num_experts, dtype=torch.float64)
        self._grams_2EII: Tensor | None = None

    def observe(self, trace: ExpertTrace, held_T: Tensor) -> None:
        """Add a batch.

        Args:
            trace: values inside the experts.
            held_T: bool, tokens that are held back.
        """
        routing, experts = trace.routing, self.layer.num_experts
        a_MI, weights_M = routing.real(trace.a_MI), routing.real(routing.routing_weights_M)
        held_M = held_T.to(a_MI.device)[routing.real(routing.tokens_M)]
        owner_M = torch.arange(experts, device=a_MI.device).repeat_interleave(
            routing.real_lengths_E, output_size=len(a_MI)
        )
        group_M, order_M = torch.sort(owner_M + experts * held_M, stable=True)
        lengths = torch.bincount(group_M, minlength=2 * experts).cpu()
        self.tokens_2E += lengths.unflatten(0, (2, -1))
        rows = zip(a_MI[order_M].split(lengths.tolist()), weights_M[order_M].split(lengths.tolist()), strict=True)
        for index, (a_MI, weights_M) in enumerate(rows):
            if weights_M.numel():
                added_II = gram(a_MI, weights_M)
                if self._grams_2EII is None:
                    self._grams_2EII = added_II.new_zeros(2, experts, *added_II.shape)
                self._grams_2EII[index // experts, index % experts] += added_II

    def grams(self) -> Tensor:
        """Gram matrices ``[2, E, I, I]`` of fitted and held-back tokens, summed over all ranks.

        Raises:
            CoverageError: activations that are NaN or infinite.
        """
        channels = max(self.layer.widths)
        grams_2EII = self._grams_2EII
        if grams_2EII is None:
            grams_2EII = torch.zeros(2, self.layer.num_experts, channels, channels)
        if torch.distributed.is_initialized():
            device = grams_2EII.device
            sums = sum_over_ranks({"grams_2EII": grams_2EII.cpu(), "tokens_2E": self.tokens_2E})
            grams_2EII = sums["grams_2EII"].to(device)
        # every entry of a row is finite if its diagonal is: |G_ij|^2 <= G_ii G_jj
        finite_E = torch.isfinite(grams_2EII.diagonal(dim1=-2, dim2=-1)).all(-1).all(0)
        if not bool(finite_E.all()):
            expert = int((~finite_E).nonzero()[0])
            raise non_finite_activations(f"{self.layer.name} expert {expert}")
        return grams_2EII
