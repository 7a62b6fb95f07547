"""Turns the statistics of all layers and ranks into scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks, sum_over_ranks
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.gradients import NllSums
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.modeling.moe_layers import router_needs
from moe_coverage_plugin.options import GRADIENT_METRICS


def gather_scores(
    observers: Sequence[LayerObserver], gradients: Sequence[GradientObserver], layer_loss_L: Tensor | None
) -> AttributionScores:
    """Sum the statistics of all observers over all ranks and turn them into scores.

    Args:
        observers: one for each MoE layer, in layer order.
        gradients: one for each of ``observers``, or none if no metric needs gradients.
        layer_loss_L: importance of the layers, if it was measured.
    """
    for observer in observers:
        assert observer.sums, f"{observer.layer.name} saw no batch"
    sums_L = [sum_over_ranks({name: total.cpu() for name, total in observer.sums.items()}) for observer in observers]
    gradient_sums_L = [sum_over_ranks(gradient.sums) for gradient in gradients]
    # after the exchange, so that all ranks raise together and none waits for another
    for observer, sums in zip(observers, sums_L, strict=True):
        observer.check_finite(sums)
    metric = observers[0].metric
    if metric in GRADIENT_METRICS:
        channels = [each.channel_scores(sums) for each, sums in zip(gradients, gradient_sums_L, strict=True)]
    else:
        channels = [observer.channel_scores(sums) for observer, sums in zip(observers, sums_L, strict=True)]
    nll = NllSums(*torch.stack([sums["nll_3E"] for sums in gradient_sums_L], dim=1)) if gradients else None
    return AttributionScores(
        names=[observer.layer.name for observer in observers],
        top_k=[observer.layer.top_k for observer in observers],
        channel_metric=metric,
        # those of one rank: scores of `obs` from equal sums may differ in the last bit between kinds of devices
        channels_LEI=gather_over_ranks(torch.stack(channels))[0],
        first_order_LE=torch.stack([sums["first_order_E"] for sums in sums_L]),
        second_order_LE=torch.stack([sums["second_order_E"] for sums in sums_L]),
        tokens_LE=torch.stack([sums["tokens_E"].long() for sums in sums_L]),
        routing_weight_sum_LE=torch.stack([sums["routing_weight_sum_E"] for sums in sums_L]),
        layer_loss_L=layer_loss_L,
        nll_signed_LE=nll.signed if nll else None,
        nll_absolute_LE=nll.absolute if nll else None,
        nll_squared_LE=nll.squared if nll else None,
        routers=[router_needs(observer.layer) for observer in observers],
    )
