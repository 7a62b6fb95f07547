"""Turns the statistics of all layers and ranks into scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks, sum_over_ranks
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.gradients import NllSums, effective_tokens
from moe_coverage_plugin.core.scores import TOKEN_FLOOR, AttributionScores
from moe_coverage_plugin.modeling.moe_layers import router_needs
from moe_coverage_plugin.options import GRADIENT_METRICS


class LayerSums(NamedTuple):
    """Sums of one layer over all ranks, on the CPU.

    Attributes:
        observed: of :class:`LayerObserver`.
        gradients: of :class:`GradientObserver`; empty if no metric needs gradients.
    """

    observed: dict[str, Tensor]
    gradients: dict[str, Tensor]


def gather_sums(observers: Sequence[LayerObserver], gradients: Sequence[GradientObserver]) -> list[LayerSums]:
    """Sum the statistics of every layer over all ranks.

    Args:
        observers: one for each MoE layer, in layer order.
        gradients: one for each of ``observers``, or none if no metric needs gradients.

    Raises:
        CoverageError: activations that are not finite.
    """
    for observer in observers:
        assert observer.sums, f"{observer.layer.name} saw no batch"
    sums_L = [sum_over_ranks({name: total.cpu() for name, total in each.sums.items()}) for each in observers]
    gradient_sums_L = [sum_over_ranks({name: total.cpu() for name, total in each.sums.items()}) for each in gradients]
    # after the exchange, so that all ranks raise together and none waits for another
    for observer, sums in zip(observers, sums_L, strict=True):
        observer.check_finite(sums)
    return [LayerSums(*each) for each in zip(sums_L, gradient_sums_L or [{}] * len(sums_L), strict=True)]


def channel_scores(
    observers: Sequence[LayerObserver], gradients: Sequence[GradientObserver], sums_L: Sequence[LayerSums]
) -> Tensor:
    """Scores ``[L, E, I]`` of any metric but ``obs``, float64 on the CPU."""
    if observers[0].metric in GRADIENT_METRICS:
        scores = [each.channel_scores(sums.gradients) for each, sums in zip(gradients, sums_L, strict=True)]
    else:
        scores = [each.channel_scores(sums.observed) for each, sums in zip(observers, sums_L, strict=True)]
    return torch.stack(scores)


def attribution_scores(
    observers: Sequence[LayerObserver],
    sums_L: Sequence[LayerSums],
    channels_LEI: Tensor,
    layer_loss_L: Tensor | None,
) -> AttributionScores:
    """Make scores of the sums of all ranks.

    Args:
        observers: one for each MoE layer, in layer order.
        sums_L: their sums.
        channels_LEI: scores of the channels.
        layer_loss_L: importance of the layers, if it was measured.
    """
    effective_LEI = None
    if "squares_EI" in sums_L[0].gradients:
        terms_L = [(each.gradients["gradient_UEI"][0], each.gradients["squares_EI"]) for each in sums_L]
        effective_LEI = torch.stack([effective_tokens(*terms) for terms in terms_L])
    nll = NllSums(*torch.stack([each.gradients["nll_3E"] for each in sums_L], dim=1)) if sums_L[0].gradients else None
    return AttributionScores(
        names=[observer.layer.name for observer in observers],
        top_k=[observer.layer.top_k for observer in observers],
        channel_metric=observers[0].metric,
        # those of one rank: scores of `obs` from equal sums may differ in the last bit between kinds of devices
        channels_LEI=gather_over_ranks(channels_LEI)[0],
        first_order_LE=torch.stack([each.observed["first_order_E"] for each in sums_L]),
        second_order_LE=torch.stack([each.observed["second_order_E"] for each in sums_L]),
        tokens_LE=torch.stack([each.observed["tokens_E"].long() for each in sums_L]),
        routing_weight_sum_LE=torch.stack([each.observed["routing_weight_sum_E"] for each in sums_L]),
        layer_loss_L=layer_loss_L,
        nll_signed_LE=nll.signed if nll else None,
        nll_absolute_LE=nll.absolute if nll else None,
        nll_squared_LE=nll.squared if nll else None,
        effective_tokens_LE=None if effective_LEI is None else effective_LEI.median(-1).values,
        few_tokens_LE=None if effective_LEI is None else (effective_LEI < TOKEN_FLOOR).sum(-1),
        routers=[router_needs(observer.layer) for observer in observers],
    )
