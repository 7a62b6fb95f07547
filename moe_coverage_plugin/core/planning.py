"""From scores to widths: which importance weighs layers and experts, and on how many levels the budget is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.allocation import InterLayer, IntraLayer, channel_budget, expert_widths, layer_budgets
from moe_coverage_plugin.core.attribution import ExpertImportance
from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.core.smoothing import Smoothing, smooth
from moe_coverage_plugin.manifest import CoverageError

Scope = Literal["layers", "global"]
LayerPrior = Literal["loss", "uniform"]
ExpertPrior = Literal["attribution", "loss", "usage", "router_weight", "uniform"]


@dataclass(frozen=True)
class CoverageStrategy:
    """How a budget becomes widths; the fields are those of ``CoverageModifier``, where they are described.

    Attributes:
        expert_importance: which measure ``attribution`` stands for.
    """

    scope: Scope = "layers"
    inter_layer: InterLayer = "coverage"
    intra_layer: IntraLayer = "coverage"
    layer_prior: LayerPrior = "loss"
    expert_prior: ExpertPrior = "attribution"
    expert_importance: ExpertImportance = "first_order"
    smoothing: Smoothing = "sqrt"

    @property
    def uses_layer_loss(self) -> bool:
        """Whether the loss of fading layers is needed."""
        if self.scope == "global":
            return False
        return self.inter_layer == "loss" or (self.inter_layer == "coverage" and self.layer_prior == "loss")

    @property
    def uses_attribution(self) -> bool:
        """Whether ``expert_importance`` is needed."""
        return self.intra_layer == "coverage" and self.expert_prior == "attribution"


class CoveragePlan(NamedTuple):
    """Widths and the importances that they follow.

    Attributes:
        widths_LE: channels that every expert keeps, int64.
        layer_prior_L: importance of the layers after smoothing; ones where it is not used.
        expert_prior_LE: importance of the experts after smoothing; ones where it is not used.
    """

    widths_LE: Tensor
    layer_prior_L: Tensor
    expert_prior_LE: Tensor


def plan_widths(scores: AttributionScores, sparsity: float, strategy: CoverageStrategy) -> CoveragePlan:
    """Share the channels that stay among all experts.

    Scope ``layers`` (paper, CBA): first among layers, then among the experts of each. Scope ``global``: once, among
    the experts of all layers, ``N_le = min{n : S_le(n) >= min(alpha * phi_le, 1) * S_le(I)}`` with one ``alpha`` for
    the model (coverage), or the ``(1 - sparsity) L E I`` best channels of the model (``topk_channel``). One scale for
    all layers makes sense for scores that are comparable between layers, which those of ``fisher`` and ``obs`` are.

    Args:
        sparsity: fraction of the ``L * E * I`` channels to remove, in ``[0, 1)``.

    Raises:
        CoverageError: sparsity out of range, scores or importances that are NaN, infinite or negative, or an
            importance that was not measured.
    """
    layer_prior_L = _layer_prior(scores, strategy)
    expert_prior_LE = _expert_prior(scores, strategy)
    channels_LEI = scores.channels_LEI
    if strategy.scope == "global":
        widths_LE = _plan_globally(channels_LEI, expert_prior_LE, sparsity, strategy.intra_layer)
    else:
        budgets_L = layer_budgets(channels_LEI, layer_prior_L, strategy.inter_layer, sparsity)
        widths_LE = expert_widths(channels_LEI, budgets_L, expert_prior_LE, strategy.intra_layer)
    return CoveragePlan(widths_LE, layer_prior_L, expert_prior_LE)


def _plan_globally(scores_LEI: Tensor, prior_LE: Tensor, sparsity: float, intra_layer: IntraLayer) -> Tensor:
    # here, where layers still have their numbers
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    require_non_negative(prior_LE, "expert importances", ("layer", "expert"))
    budget_1 = torch.tensor([channel_budget(scores_LEI.numel(), sparsity)])
    widths_1D = expert_widths(scores_LEI.flatten(0, 1)[None], budget_1, prior_LE.reshape(1, -1), intra_layer)
    return widths_1D.reshape(prior_LE.shape)


def _layer_prior(scores: AttributionScores, strategy: CoverageStrategy) -> Tensor:
    if not strategy.uses_layer_loss:
        return torch.ones(len(scores.names), dtype=torch.float64)
    return smooth(_measured(scores.layer_loss_L, "the loss of fading layers", "layer_noise"), strategy.smoothing)


def _expert_prior(scores: AttributionScores, strategy: CoverageStrategy) -> Tensor:
    prior = strategy.expert_prior if strategy.intra_layer == "coverage" else strategy.intra_layer
    match prior:
        case "attribution":
            importance_LE = getattr(scores, f"{strategy.expert_importance}_LE")
            measured_LE = _measured(importance_LE, strategy.expert_importance, "expert_importance")
            return smooth(measured_LE, strategy.smoothing)
        case "loss":
            return smooth(scores.second_order_LE, strategy.smoothing)
        case "usage":
            return scores.tokens_LE.double()
        case "router_weight":
            return scores.routing_weight_sum_LE
        case _:
            return torch.ones_like(scores.routing_weight_sum_LE)


def _measured(importance: Tensor | None, what: str, field: str) -> Tensor:
    if importance is None:
        raise CoverageError(
            f"the scores do not hold {what}, which this plan weighs by: measure again with {field} of "
            "AttributionModifier set, or choose a plan without it"
        )
    return importance
