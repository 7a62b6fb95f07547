"""CBA: coverage-maximized budgets of layers and widths of experts (paper, coverage-based allocation)."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor

from moe_coverage_plugin.core.allocation import channel_budget
from moe_coverage_plugin.core.feasibility import check_budget
from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import router_needs
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan
from moe_coverage_plugin.options import AlignmentOptions, CoverageOptions

COMPARABLE_METRICS = ("fisher", "obs", "own")


class CoverageModifier(CoverageOptions, PlanModifier):
    """Decides how many channels every expert keeps; changes no weight.

    The default keeps the best channels of the model. Coverage (paper, CBA) raises a level of coverage, scaled by
    importance, until the channels that reach it use up the budget: with the scores of its channels in descending order
    and their prefix sums ``S_g(n)``, a group ``g`` of importance ``phi_g`` keeps
    ``N_g = min{n : S_g(n) >= min(alpha phi_g, 1) S_g(total)}`` under the largest ``alpha`` that fits. The other
    strategies are those of the paper's ablation. Fields and their defaults:
    :class:`~moe_coverage_plugin.options.CoverageOptions`.

    Lifecycle:

    - on_initialize
        - find the AttributionModifier before this one, and check that it measures what the plan needs
        - if its scores are from a file: make the plan once, so that errors appear before calibration
    - on_calibration_end
        - make the plan from the scores

    Example recipe::

        CoverageModifier:
          sparsity: 0.25
    """

    _attribution: AttributionModifier = PrivateAttr()

    @property
    def attribution(self) -> AttributionModifier:
        """The modifier that measures for this one, available after the recipe has initialized."""
        return self._attribution

    @property
    def total_channels(self) -> int:
        """Channels of all observed experts."""
        return sum(layer.num_experts for layer in self.attribution.layers) * self.attribution.intermediate_size

    @property
    def budget(self) -> int:
        """Channels to keep of :attr:`total_channels`."""
        return channel_budget(self.total_channels, self.sparsity)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the scores' source and check that it fits."""
        prepare(self)
        self._attribution = predecessor(self, AttributionModifier)
        if self.attribution.scores is not None:
            plan_widths(self.attribution.measured, self, self.attribution.expert_importance)
        elif self.uses_layer_loss and self.attribution.layer_noise is None:
            raise CoverageError(
                f"inter_layer={self.inter_layer!r} weighs layers by their loss, which layer_noise=None leaves "
                'unmeasured: set layer_noise of AttributionModifier, or inter_layer="coverage" with '
                'layer_prior="uniform"'
            )
        self._warn_of_incomparable_scores()
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Make the plan."""
        scores = self.attribution.measured
        plan = plan_widths(scores, self, self.attribution.expert_importance)
        notes = {
            "budgets_L": plan.widths_LE.sum(-1).tolist(),
            "layer_loss_L": _listed(scores.layer_loss_L),
            "layer_prior_L": plan.layer_prior_L.tolist(),
            "prior_LE": plan.expert_prior_LE.tolist(),
        }
        self._plan = WidthPlan(scores, plan.widths_LE, notes=notes)
        logger.info(f"Coverage keeps {int(plan.widths_LE.sum())} of {scores.channels_LEI.numel()} expert channels")

    def check_budget(self, alignment: AlignmentOptions | None, layout: Layout) -> None:
        """Check that every plan leaves each layer the experts that its router needs, whatever the scores are.

        Args:
            alignment: options of the modifier that aligns the widths; ``None``: there is none.
            layout: how experts will be stored.

        Raises:
            CoverageError: see :func:`~moe_coverage_plugin.core.feasibility.check_budget`.
        """
        layers = self.attribution.layers
        routers = [router_needs(layer) for layer in layers]
        check_budget(self, alignment, layout, routers, layers[0].num_experts, self.attribution.intermediate_size)

    def _warn_of_incomparable_scores(self) -> None:
        metric = self.attribution.channel_metric
        if self.scope == "global" and self.intra_layer == "topk_channel" and metric not in COMPARABLE_METRICS:
            logger.warning(
                f"scope='global' compares channel scores of all layers, which channel_metric={metric!r} does not make "
                "comparable: use channel_metric='fisher', or scope='layers'"
            )


def _listed(tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.tolist()
