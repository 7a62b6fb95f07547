"""The widths that one planning modifier passes to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmcompressor.modifiers import Modifier
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor

from moe_coverage_plugin.core.alignment import Alignment
from moe_coverage_plugin.core.scores import AttributionScores


@dataclass(frozen=True)
class WidthPlan:
    """How many channels every expert will keep.

    Attributes:
        scores: the scores that the plan was made from.
        widths_LE: kept channels of every expert, int64.
        block_size: channels that every width is a multiple of.
        notes: figures for the report.
    """

    scores: AttributionScores
    widths_LE: Tensor
    block_size: int = 1
    notes: dict[str, Any] = field(default_factory=dict)


def routing_notes(aligned: Alignment) -> dict[str, int]:
    """Return what was changed in a plan because routers need experts, for the report, and warn of it."""
    notes = {"kept_for_routers": aligned.kept_for_routers, "layers_raised_for_routers": aligned.raised_layers}
    if any(notes.values()):
        logger.warning(
            f"The plan left some routers fewer experts than they need: {aligned.kept_for_routers} experts that it "
            f"removed are kept, and {aligned.raised_layers} layers get more channels, at the cost of others"
        )
    return notes


class PlanModifier(Modifier):
    """A modifier that decides widths and changes no model: coverage and alignment."""

    _plan: WidthPlan | None = PrivateAttr(default=None)

    @property
    def width_multiple(self) -> int:
        """Channels that every width will be a multiple of."""
        return 1

    @property
    def planned(self) -> bool:
        """Whether this modifier's pass has ended."""
        return self._plan is not None

    @property
    def plan(self) -> WidthPlan:
        """The plan, available after this modifier's pass."""
        assert self._plan is not None, f"{type(self).__name__} has not run yet"
        return self._plan
