"""Whole blocks: alignment-aware redistribution (AAR, paper), or the best blocks of all."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr

from moe_coverage_plugin.core.alignment import (
    Alignment,
    AlignmentStrategy,
    RemainderRule,
    align_blocks,
    align_widths,
    check_alignment,
)
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import experts_needed
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan


class AlignmentModifier(PlanModifier):
    """Makes the widths of CoverageModifier whole blocks, within its budget.

    Args:
        block_size: ``a``, channels; it must divide the expert width, and a quantization group must divide it.
        min_width: ``m``, channels; narrower experts are removed whole. 0: none is.
        strategy: ``hamilton`` (paper, AAR) keeps to the widths: experts below ``m`` are dropped, widths are floored to
            ``a floor(N / a)``, and the freed blocks of a layer go to its largest remainders, at most one each.
            ``blocks`` keeps to the budget only, that of each layer, or of the model after ``scope: global``, and takes
            the widths ``N_le in {0, a, 2a, ...}`` of largest ``sum_le S_le(N_le)``, where ``S_le(n)`` is the score of
            an expert's ``n`` best channels, with at least as many experts in a layer as its router picks, and in each
            group of a router that picks within groups. What cannot be handed out is reported.
        rule: of ``hamilton``: remainders by channels (``l-r-c``) or by removed score (``l-r-s``).

    Example recipe::

        AlignmentModifier:
          block_size: 128
          min_width: 128
    """

    block_size: int = 128
    min_width: int = 128
    strategy: AlignmentStrategy = "hamilton"
    rule: RemainderRule = "l-r-c"

    _coverage: CoverageModifier = PrivateAttr()

    @property
    def width_multiple(self) -> int:
        return self.block_size

    @property
    def narrowest(self) -> int:
        return self.block_size if self.strategy == "blocks" else max(self.block_size, self.min_width)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._coverage = predecessor(self, CoverageModifier)
        intermediate_size = self._coverage.attribution.intermediate_size
        if self.strategy == "blocks" and (idle := {"min_width", "rule"} & self.model_fields_set):
            raise CoverageError(
                f'strategy="blocks" keeps every expert it keeps at one block or more, so {" and ".join(sorted(idle))} '
                'would do nothing: leave it out, or use strategy="hamilton"'
            )
        check_alignment(self.block_size, 0 if self.strategy == "blocks" else self.min_width, intermediate_size)
        if not 0 <= self.min_width <= intermediate_size and self.strategy == "hamilton":
            raise CoverageError(
                f"min_width is {self.min_width}, it must lie between 0 and the expert width {intermediate_size}: "
                "lower it"
            )
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        plan = self._coverage.plan
        aligned = self._align(plan)
        notes = plan.notes | {"unspent_channels": aligned.unspent, "dropped_by_alignment": len(aligned.dropped)}
        self._plan = WidthPlan(plan.scores, aligned.widths_LE, self.block_size, notes)
        logger.info(
            f"Alignment to blocks of {self.block_size}: {len(aligned.dropped)} experts dropped, {aligned.unspent} "
            "channels of the budget not spent"
        )

    def _align(self, plan: WidthPlan) -> Alignment:
        scores_LEI = plan.scores.channels_LEI
        if self.strategy == "hamilton":
            return align_widths(plan.widths_LE, scores_LEI, self.block_size, self.min_width, self.rule)
        across_layers = self._coverage.scope == "global"
        layers = self._coverage.attribution.layers
        groups_L, needed_L = zip(*(experts_needed(layer) for layer in layers), strict=True)
        return align_blocks(plan.widths_LE, scores_LEI, self.block_size, needed_L, across_layers, groups_L)
