"""CBA: coverage-maximized budgets for layers and experts (paper, coverage-based allocation)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor

from moe_coverage_plugin.calibration.scores import AttributionScores
from moe_coverage_plugin.core.allocation import InterLayer, IntraLayer, channel_budget, expert_widths, layer_budgets
from moe_coverage_plugin.core.smoothing import Smoothing, smooth
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan

LayerPrior = Literal["loss", "uniform"]
ExpertPrior = Literal["attribution", "loss", "usage", "router_weight", "uniform"]


class CoverageModifier(PlanModifier):
    """Decides how many channels every expert keeps.

    A level of coverage, scaled by importance, is raised until the channels needed to reach it use up the budget: first
    over layers, then over the experts of each layer. The other strategies are those of the paper's ablation.

    Args:
        sparsity: fraction of the observed experts' channels to remove, in [0, 1); layers in ``ignore`` do not count.
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
    def uses_layer_loss(self) -> bool:
        """Whether the chosen strategies need the loss of fading layers."""
        return self.inter_layer == "loss" or (self.inter_layer == "coverage" and self.layer_prior == "loss")

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._attribution = predecessor(self, AttributionModifier)
        if not 0.0 <= self.sparsity < 1.0:
            raise CoverageError(
                f"sparsity is {self.sparsity}, it must be at least 0 and below 1: the fraction to remove"
            )
        if self.uses_layer_loss and self.attribution.layer_noise is None:
            raise CoverageError(
                f"inter_layer={self.inter_layer!r} weighs layers by their loss, which layer_noise=None leaves "
                'unmeasured: set layer_noise of AttributionModifier, or inter_layer="coverage" with '
                'layer_prior="uniform"'
            )
        return True

    @property
    def total_channels(self) -> int:
        """Channels of all observed experts."""
        return sum(block.num_experts for block in self.attribution.blocks) * self.attribution.intermediate_size

    @property
    def budget(self) -> int:
        """Channels to keep of :attr:`total_channels`."""
        return channel_budget(self.total_channels, self.sparsity)

    def require_channels(self, min_width: int) -> None:
        """Refuse a budget too small for every layer to keep ``top_k`` experts of ``min_width`` channels.

        Raises:
            CoverageError: as said; a sparsity that leaves every expert ``min_width`` channels is named.
        """
        blocks = self.attribution.blocks
        needed = sum(block.top_k for block in blocks) * min_width
        if self.budget < needed:
            # rounded down, so that the number named does what is said
            enough = math.floor(1000 * (1 - min_width / self.attribution.intermediate_size)) / 1000
            raise CoverageError(
                f"sparsity={self.sparsity} leaves {self.budget} of {self.total_channels} expert channels, but "
                f"{len(blocks)} layers that route every token to {blocks[0].top_k} experts need at least {needed}: "
                f"lower it, for instance to {enough}, which leaves every expert {min_width} on average"
            )

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        scores = self.attribution.scores
        layer_loss_L = self._layer_importance(scores)
        budgets_L = layer_budgets(scores.channels_LEI, layer_loss_L, self.inter_layer, self.sparsity)
        prior_LE = self._expert_importance(scores)
        widths_LE = expert_widths(scores.channels_LEI, budgets_L, prior_LE, self.intra_layer)
        notes = {
            "budgets_L": budgets_L.tolist(),
            "layer_loss_L": _listed(scores.layer_loss_L),
            "prior_LE": prior_LE.tolist(),
        }
        self._plan = WidthPlan(scores, widths_LE, notes=notes)
        logger.info(f"Coverage keeps {int(widths_LE.sum())} of {scores.channels_LEI.numel()} expert channels")

    def _layer_importance(self, scores: AttributionScores) -> Tensor:
        if not self.uses_layer_loss:
            return torch.ones(len(scores.names), dtype=torch.float64)
        assert scores.layer_loss_L is not None
        return smooth(scores.layer_loss_L, self.smoothing)

    def _expert_importance(self, scores: AttributionScores) -> Tensor:
        prior = self.expert_prior if self.intra_layer == "coverage" else self.intra_layer
        match prior:
            case "attribution":
                return smooth(self.attribution.expert_scores, self.smoothing)
            case "loss":
                return smooth(scores.second_order_LE, self.smoothing)
            case "usage":
                return scores.tokens_LE.double()
            case "router_weight":
                return scores.gate_sum_LE
            case _:
                return torch.ones_like(scores.gate_sum_LE)


def _listed(tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.tolist()
