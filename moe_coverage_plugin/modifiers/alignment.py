"""AAR: alignment-aware redistribution (paper, alignment of widths to hardware blocks)."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr

from moe_coverage_plugin.core.alignment import RemainderRule, align_widths, check_alignment
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan


class AlignmentModifier(PlanModifier):
    """Rounds the widths of CoverageModifier to whole blocks, within each layer's budget.

    Experts below ``min_width`` are dropped, widths are floored, and the freed blocks of a layer go to the largest
    remainders (Hamilton), at most one each. What cannot be handed out is reported.

    Args:
        block_size: ``a``, channels; it must divide the expert width, and a quantization group must divide it.
        min_width: ``m``, channels; narrower experts are removed whole. 0: none is.
        rule: remainders by channels (``l-r-c``) or by removed score (``l-r-s``).

    Example recipe::

        AlignmentModifier:
          block_size: 128
          min_width: 128
    """

    block_size: int = 128
    min_width: int = 128
    rule: RemainderRule = "l-r-c"

    _coverage: CoverageModifier = PrivateAttr()

    @property
    def width_multiple(self) -> int:
        return self.block_size

    @property
    def narrowest(self) -> int:
        return max(self.block_size, self.min_width)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._coverage = predecessor(self, CoverageModifier)
        intermediate_size = self._coverage.attribution.intermediate_size
        check_alignment(self.block_size, self.min_width, intermediate_size)
        if not 0 <= self.min_width <= intermediate_size:
            raise CoverageError(
                f"min_width is {self.min_width}, it must lie between 0 and the expert width {intermediate_size}: "
                "lower it"
            )
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        plan = self._coverage.plan
        aligned = align_widths(plan.widths_LE, plan.scores.channels_LEI, self.block_size, self.min_width, self.rule)
        notes = plan.notes | {"unspent_channels": aligned.unspent, "dropped_by_min_width": len(aligned.dropped)}
        self._plan = WidthPlan(plan.scores, aligned.widths_LE, self.block_size, notes)
        logger.info(
            f"Alignment to blocks of {self.block_size}: {len(aligned.dropped)} experts below {self.min_width} "
            f"channels dropped, {aligned.unspent} channels of the budget not spent"
        )
