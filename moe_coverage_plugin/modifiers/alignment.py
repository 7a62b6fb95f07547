"""Widths in multiples of a block: alignment-aware redistribution (paper, AAR), or the best blocks."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr

from moe_coverage_plugin.core.alignment import align
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import predecessor, prepare
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan, routing_notes
from moe_coverage_plugin.options import AlignmentOptions


class AlignmentModifier(AlignmentOptions, PlanModifier):
    """Turns the widths of CoverageModifier into multiples of a block size, within its budget; changes no weight.

    Kernels and quantization groups need such widths. Channels of the budget that no block could use are reported.
    Fields and their defaults: :class:`~moe_coverage_plugin.options.AlignmentOptions`.

    Lifecycle:

    - on_initialize
        - find the CoverageModifier before this one, and check block size and budget against its experts and routers
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

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the plan's source and check that blocks fit."""
        prepare(self)
        self._coverage = predecessor(self, CoverageModifier)
        self._coverage.check_budget(self, "ragged")
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Align the widths of the plan."""
        plan = self._coverage.plan
        aligned = align(plan.widths_LE, plan.scores, self, self._coverage.scope)
        notes = plan.notes | {"unspent_channels": aligned.unspent, "removed_by_alignment": len(aligned.removed)}
        self._plan = WidthPlan(plan.scores, aligned.widths_LE, self.block_size, notes | routing_notes(aligned))
        logger.info(
            f"Alignment to blocks of {self.block_size}: {len(aligned.removed)} experts removed, {aligned.unspent} "
            "channels of the budget not spent"
        )
