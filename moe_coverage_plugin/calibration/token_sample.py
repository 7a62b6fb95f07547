"""Some of the tokens that are routed to each expert of a layer, for fits that need the tokens themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.core.refit import Tokens
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer


class TokenSample:
    """The inputs of each expert for at most about ``most`` of its tokens, evenly spread over all batches.

    They take ``most * E * H`` numbers on the device of the experts while a layer is observed.
    """

    def __init__(self, layer: MoELayer, most: int, batches: int):
        """Create an empty sample.

        Args:
            layer: the layer to observe.
            most: tokens of each expert.
            batches: batches that will be observed on all ranks.
        """
        self._per_batch = -(-most // batches)
        self._parts: list[list[Tokens]] = [[] for _ in range(layer.num_experts)]
        # also of a rank whose batches have no tokens for an expert
        self._device = torch.device("cpu")

    def observe(self, trace: ExpertTrace, held_T: Tensor) -> None:
        """Add tokens of a batch.

        Args:
            trace: values inside the experts.
            held_T: bool, tokens that are held back.
        """
        routing = trace.routing
        self._device = trace.x_MH.device
        x_MH, weight_M, token_M = (
            routing.real(rows) for rows in (trace.x_MH, routing.routing_weights_M, routing.tokens_M)
        )
        held_M = held_T.to(token_M.device)[token_M]
        first = 0
        for parts, length in zip(self._parts, routing.real_lengths_E.tolist(), strict=True):
            if length:
                rows_N = first + _spread(length, self._per_batch).to(token_M.device)
                parts.append(Tokens(x_MH[rows_N], weight_M[rows_N], held_M[rows_N]))
            first += length

    def tokens(self, expert: int) -> Tokens | None:
        """The tokens of an expert on all ranks, ``None`` if it has none; collective."""
        parts = self._parts[expert]
        if torch.distributed.is_initialized():
            own = [Tokens(*(each.cpu() for each in part)) for part in parts]
            parts = [part for rank in gather_over_ranks(own) for part in rank]
            parts = [Tokens(*(each.to(self._device) for each in part)) for part in parts]
        return Tokens(*map(torch.cat, zip(*parts, strict=True))) if parts else None


def _spread(length: int, most: int) -> Tensor:
    """At most ``most`` indices below ``length``, evenly spread: rows of an expert are in the order of slots."""
    count = min(length, most)
    return torch.arange(count) * length // count
