"""From scores to widths: the priors of layers and experts, and the levels on which the budget is shared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.allocation import channel_budget, expert_widths, layer_budgets
from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.core.smoothing import smooth
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import CoverageOptions, ExpertImportance, IntraLayer


class CoveragePlan(NamedTuple):
    """Widths and the priors that they follow.

    Attributes:
        widths_LE: kept channels of every expert, int64.
        layer_prior_L: importance of the layers after smoothing; ones if it is not used.
        expert_prior_LE: importance of the experts after its square root is taken; ones if it is not used.
    """

    widths_LE: Tensor
    layer_prior_L: Tensor
    expert_prior_LE: Tensor


def plan_widths(
    scores: AttributionScores, options: CoverageOptions, expert_importance: ExpertImportance = "first_order"
) -> CoveragePlan:
    """Share the channels to keep among all experts.

    Scope ``layers`` (paper, CBA): first among layers, then among the experts of each. Scope ``global``: once, among
    the experts of all layers, ``N_le = min{n : S_le(n) >= min(alpha * phi_le, 1) * S_le(I)}`` with one ``alpha`` for
    the model (coverage), or the ``(1 - sparsity) L E I`` best channels of the model (``topk_channel``). ``global``
    needs scores that are comparable between layers, such as those of ``fisher`` and ``obs``.

    Args:
        scores: measurements of the ``L`` layers.
        options: sparsity, the fraction of the ``L * E * I`` channels to remove, and how the others are shared.
        expert_importance: the measurement that the prior ``attribution`` means.

    Raises:
        CoverageError: scores or importances that are NaN, infinite or negative, or an importance that was not
            measured.
    """
    layer_prior_L = _layer_prior(scores, options)
    expert_prior_LE = _expert_prior(scores, options, expert_importance)
    channels_LEI = scores.channels_LEI
    if options.scope == "global":
        widths_LE = _plan_globally(channels_LEI, expert_prior_LE, options.sparsity, options.intra_layer)
    else:
        budgets_L = layer_budgets(channels_LEI, layer_prior_L, options.inter_layer, options.sparsity)
        widths_LE = expert_widths(channels_LEI, budgets_L, expert_prior_LE, options.intra_layer)
    return CoveragePlan(widths_LE, layer_prior_L, expert_prior_LE)


def _plan_globally(scores_LEI: Tensor, prior_LE: Tensor, sparsity: float, intra_layer: IntraLayer) -> Tensor:
    # before layers are flattened, so that messages can name them
    require_non_negative(scores_LEI, "channel scores", ("layer", "expert"))
    require_non_negative(prior_LE, "expert importances", ("layer", "expert"))
    budget_1 = torch.tensor([channel_budget(scores_LEI.numel(), sparsity)])
    widths_1D = expert_widths(scores_LEI.flatten(0, 1)[None], budget_1, prior_LE.reshape(1, -1), intra_layer)
    return widths_1D.reshape(prior_LE.shape)


def _layer_prior(scores: AttributionScores, options: CoverageOptions) -> Tensor:
    if not options.uses_layer_loss:
        return torch.ones(len(scores.names), dtype=torch.float64)
    return smooth(_measured(scores.layer_loss_L, "the importance of layers", "layer_noise"), options.smoothing)


def _expert_prior(scores: AttributionScores, options: CoverageOptions, expert_importance: ExpertImportance) -> Tensor:
    prior = options.expert_prior if options.intra_layer == "coverage" else options.intra_layer
    match prior:
        case "attribution":
            importance_LE = getattr(scores, f"{expert_importance}_LE")
            return smooth(_measured(importance_LE, expert_importance, "expert_importance"), "sqrt")
        case "loss":
            return smooth(scores.second_order_LE, "sqrt")
        case "usage":
            return scores.tokens_LE.double()
        case "router_weight":
            return scores.routing_weight_sum_LE
        case _:
            return torch.ones_like(scores.routing_weight_sum_LE)


def _measured(importance: Tensor | None, what: str, field: str) -> Tensor:
    if importance is None:
        raise CoverageError(
            f"the scores do not contain {what}, which this plan needs: measure again with {field} of "
            "AttributionModifier set, or choose a plan without it"
        )
    return importance
