"""The result of observing a model: scores of channels, experts and layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moe_coverage_plugin.core.kept_experts import RouterNeeds
from moe_coverage_plugin.options import ChannelMetric

# "own": scores that a user computed by another rule
StoredMetric = Literal[ChannelMetric, "own"]
# scores of an expert that fewer calibration tokens reached depend on which tokens they were
TOKEN_FLOOR = 32


@dataclass(frozen=True)
class AttributionScores:
    """All measurements that a plan is made from. Tensors are float64 on the CPU if no other dtype is given.

    Attributes:
        names: module path of the experts of each MoE layer, in layer order.
        top_k: experts picked for a token, per layer.
        channel_metric: the metric of ``channels_LEI``; ``own`` for scores that this package did not compute.
        channels_LEI: channel scores, at least 0.
        first_order_LE: ``sum_t <g z, y> / ||y||^2``, the paper's first-order attribution of an expert.
        second_order_LE: ``sum_t ||g z||^2 / ||y||^2``, the exact layer-local loss when the expert is removed.
        tokens_LE: number of routed tokens, int64.
        routing_weight_sum_LE: sum of routing weights.
        layer_loss_L: rise of the model's loss when the output of a layer is scaled down; ``None`` if not measured.
        nll_signed_LE: ``-sum_t <dNLL/dz, z>``, the first-order rise of the model's loss when the expert is removed;
            may be negative. Like the next two, ``None`` without a gradient pass.
        nll_absolute_LE: ``sum_t |<dNLL/dz, z>|``.
        nll_squared_LE: ``sum_t <dNLL/dz, z>^2``.
        effective_tokens_LE: median over the channels of an expert of the number of tokens that their scores rest on
            (:func:`~moe_coverage_plugin.core.gradients.effective_tokens`); ``None`` without ``fisher`` or ``obs``.
        few_tokens_LE: number of channels whose scores rest on fewer than :data:`TOKEN_FLOOR` tokens, int64.
        routers: experts that the router of each layer needs; ``None`` in files of earlier releases.
    """

    names: list[str]
    top_k: list[int]
    channel_metric: StoredMetric
    channels_LEI: Tensor
    first_order_LE: Tensor
    second_order_LE: Tensor
    tokens_LE: Tensor
    routing_weight_sum_LE: Tensor
    layer_loss_L: Tensor | None = None
    nll_signed_LE: Tensor | None = None
    nll_absolute_LE: Tensor | None = None
    nll_squared_LE: Tensor | None = None
    effective_tokens_LE: Tensor | None = None
    few_tokens_LE: Tensor | None = None
    routers: list[RouterNeeds] | None = None

    @property
    def router_needs(self) -> list[RouterNeeds]:
        """Experts that the router of each layer needs; its top-k in one group if nothing else is known."""
        return self.routers or [RouterNeeds(1, picked) for picked in self.top_k]

    @property
    def unreached(self) -> dict[str, list[int]]:
        """Experts that no calibration token was routed to, by layer."""
        return self._where(self.tokens_LE == 0)

    def reached_by_fewer_than(self, tokens: int) -> dict[str, list[int]]:
        """Experts with at least one calibration token but fewer than ``tokens``, by layer."""
        return self._where((self.tokens_LE > 0) & (self.tokens_LE < tokens))

    @property
    def certainty(self) -> str | None:
        """How many channels have scores that rest on few tokens, and what it would take; ``None`` if not measured."""
        if self.few_tokens_LE is None or self.effective_tokens_LE is None:
            return None
        few, total = int(self.few_tokens_LE.sum()), self.channels_LEI.numel()
        # experts without any token need other text, not more of it
        known = self.effective_tokens_LE[self.effective_tokens_LE > 0]
        typical = f"{float(known.median()):.0f}" if known.numel() else "0"
        floor = f"{TOKEN_FLOOR} effective tokens"
        found = f"{few} of {total} channel scores rest on fewer than {floor}; a typical one on {typical}"
        if not known.numel() or float(known.min()) >= TOKEN_FLOOR:
            return found
        times = math.ceil(TOKEN_FLOOR / float(known.min()))
        return f"{found}. {times} times as much text would give most channels of every expert {TOKEN_FLOOR}"

    def _where(self, flags_LE: Tensor) -> dict[str, list[int]]:
        found = {
            name: flags_E.nonzero().flatten().tolist() for name, flags_E in zip(self.names, flags_LE, strict=True)
        }
        return {name: experts for name, experts in found.items() if experts}
