"""Widths in multiples of a block: alignment-aware redistribution (paper, AAR), or the best blocks."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr

from moe_coverage_plugin.core.alignment import Alignment, align_blocks, align_widths, check_alignment
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import experts_needed
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan
from moe_coverage_plugin.options import AlignmentOptions


class AlignmentModifier(AlignmentOptions, PlanModifier):
    """Turns the widths of CoverageModifier into multiples of a block size, within its budget; changes no weight.

    Kernels and quantization groups need such widths. Channels of the budget that no block could use are reported.
    Fields and their defaults: :class:`~moe_coverage_plugin.options.AlignmentOptions`.

    Lifecycle:

    - on_initialize
        - find the CoverageModifier before this one, and check the block size against the width of its experts
    - on_calibration_end
        - align the widths

    Example recipe::

        AlignmentModifier:
          block_size: 128
    """

    _coverage: CoverageModifier = PrivateAttr()

    @property
    def width_multiple(self) -> int:
        """Block size in channels."""
        return self.block_size

    @property
    def narrowest(self) -> int:
        """The fewest channels that an expert can keep without being removed."""
        return self.block_size if self.strategy == "blocks" else max(self.block_size, self.min_width)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the plan's source and check that blocks fit."""
        prepare(self)
        self._coverage = predecessor(self, CoverageModifier)
        intermediate_size = self._coverage.attribution.intermediate_size
        min_width = self.min_width if self.strategy == "hamilton" else 0
        check_alignment(self.block_size, min_width, intermediate_size)
        if min_width > intermediate_size:
            raise CoverageError(
                f"min_width={min_width} is above the expert width {intermediate_size}, so all experts would be "
                "removed: lower it"
            )
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Align the widths of the plan."""
        plan = self._coverage.plan
        aligned = self._align(plan)
        notes = plan.notes | {"unspent_channels": aligned.unspent, "removed_by_alignment": len(aligned.removed)}
        self._plan = WidthPlan(plan.scores, aligned.widths_LE, self.block_size, notes)
        logger.info(
            f"Alignment to blocks of {self.block_size}: {len(aligned.removed)} experts removed, {aligned.unspent} "
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
