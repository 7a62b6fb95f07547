"""CBA: coverage-maximized budgets for layers and experts (paper, coverage-based allocation)."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor

from moe_coverage_plugin.core.allocation import InterLayer, IntraLayer, channel_budget
from moe_coverage_plugin.core.planning import CoverageStrategy, ExpertPrior, LayerPrior, Scope, plan_widths
from moe_coverage_plugin.core.smoothing import Smoothing
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import experts_needed
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan


class CoverageModifier(PlanModifier):
    """Decides how many channels every expert keeps.

    A level of coverage, scaled by importance, is raised until the channels needed to reach it use up the budget: with
    sorted channel scores and their prefix sums ``S_g(n)``, group ``g`` of importance ``phi_g`` keeps
    ``N_g = min{n : S_g(n) >= min(alpha phi_g, 1) S_g(total)}`` under the largest ``alpha`` that fits (paper, CBA). The
    other strategies are those of the paper's ablation.

    Args:
        sparsity: fraction of the observed experts' channels to remove, in [0, 1); layers in ``ignore`` do not count.
        scope: ``layers`` shares the budget among layers, then each part among the layer's experts, as the paper does.
            ``global`` shares it once, among the experts of all layers, by ``intra_layer``: one ``alpha`` for the
            model, or, with ``topk_channel``, the best channels of the model: ``sum_le S_le(N_le)`` at its largest.
            For scores on one scale: ``fisher``, ``obs``. ``inter_layer`` and ``layer_prior`` have no part in it.
        inter_layer: budgets of layers. ``coverage``, ``uniform``, ``u_shaped`` (more at both ends) or ``loss`` (in
            proportion to the layer's importance).
        intra_layer: widths within a layer. ``coverage``, ``uniform``, ``loss``, ``usage``, ``router_weight`` (in
            proportion to the prior of that name) or ``topk_channel`` (the layer's best channels, whoever's they are).
        layer_prior: importance in the coverage of layers: the ``loss`` measured by AttributionModifier, or none.
        expert_prior: importance in the coverage of experts: ``attribution`` (AttributionModifier's
            ``expert_importance``), ``loss`` (exact loss of removing the expert), ``usage`` (routed tokens),
            ``router_weight``, or ``uniform``.
        smoothing: applied to loss and attribution before use (paper, appendix C.3.3).

    Example recipe::

        CoverageModifier:
          sparsity: 0.25
    """

    sparsity: float
    scope: Scope = "layers"
    inter_layer: InterLayer = "coverage"
    intra_layer: IntraLayer = "coverage"
    layer_prior: LayerPrior = "loss"
    expert_prior: ExpertPrior = "attribution"
    smoothing: Smoothing = "sqrt"

    _attribution: AttributionModifier = PrivateAttr()

    @property
    def attribution(self) -> AttributionModifier:
        """The modifier that observes for this one, known once the recipe initialized."""
        return self._attribution

    @property
    def strategy(self) -> CoverageStrategy:
        """The strategy that the fields describe."""
        described = {
            field.name: getattr(self, field.name)
            for field in fields(CoverageStrategy)
            if field.name in type(self).model_fields
        }
        return CoverageStrategy(**described, expert_importance=self.attribution.expert_importance)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._attribution = predecessor(self, AttributionModifier)
        if not 0.0 <= self.sparsity < 1.0:
            raise CoverageError(
                f"sparsity is {self.sparsity}, it must be at least 0 and below 1: the fraction to remove"
            )
        if self.scope == "global" and (idle := {"inter_layer", "layer_prior"} & self.model_fields_set):
            raise CoverageError(
                f'scope="global" shares the budget among all experts at once, where {" and ".join(sorted(idle))} '
                'would do nothing: leave it out, or use scope="layers"'
            )
        if self.attribution.scores is not None:
            # everything is known: what cannot be planned is refused now
            plan_widths(self.attribution.measured, self.sparsity, self.strategy)
        elif self.strategy.uses_layer_loss and self.attribution.layer_noise is None:
            raise CoverageError(
                f"inter_layer={self.inter_layer!r} weighs layers by their loss, which layer_noise=None leaves "
                'unmeasured: set layer_noise of AttributionModifier, or inter_layer="coverage" with '
                'layer_prior="uniform"'
            )
        return True

    @property
    def total_channels(self) -> int:
        """Channels of all observed experts."""
        return sum(layer.num_experts for layer in self.attribution.layers) * self.attribution.intermediate_size

    @property
    def budget(self) -> int:
        """Channels to keep of :attr:`total_channels`."""
        return channel_budget(self.total_channels, self.sparsity)

    def require_channels(self, min_width: int) -> None:
        """Refuse a budget too small for every layer to keep what its router needs, in ``min_width`` channels each.

        Raises:
            CoverageError: as said; a sparsity that leaves every expert ``min_width`` channels is named.
        """
        layers = self.attribution.layers
        experts = [math.prod(experts_needed(layer)) for layer in layers]
        needed = sum(experts) * min_width
        if self.budget < needed:
            # rounded down, so that the number named does what is said
            enough = math.floor(1000 * (1 - min_width / self.attribution.intermediate_size)) / 1000
            raise CoverageError(
                f"sparsity={self.sparsity} leaves {self.budget} of {self.total_channels} expert channels, but "
                f"{len(layers)} layers whose routers cannot do with fewer than {experts[0]} experts need at least "
                f"{needed}: lower it, for instance to {enough}, which leaves every expert {min_width} on average"
            )

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        scores = self.attribution.measured
        plan = plan_widths(scores, self.sparsity, self.strategy)
        notes = {
            "budgets_L": plan.widths_LE.sum(-1).tolist(),
            "layer_loss_L": _listed(scores.layer_loss_L),
            "layer_prior_L": plan.layer_prior_L.tolist(),
            "prior_LE": plan.expert_prior_LE.tolist(),
        }
        self._plan = WidthPlan(scores, plan.widths_LE, notes=notes)
        logger.info(f"Coverage keeps {int(plan.widths_LE.sum())} of {scores.channels_LEI.numel()} expert channels")


def _listed(tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.tolist()
