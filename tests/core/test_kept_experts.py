"""A layer may lose experts down to as many as its router picks, and no further."""

from __future__ import annotations

import pytest
import torch

from moe_coverage_plugin.core.kept_experts import check_kept_experts
from moe_coverage_plugin.manifest import CoverageError

WIDTHS_LE = torch.tensor([[0, 4, 0, 8], [1, 1, 1, 1]])


def test_as_many_as_the_router_picks_are_enough() -> None:
    check_kept_experts(["first", "second"], [2, 4], WIDTHS_LE)


def test_one_fewer_is_refused_by_name() -> None:
    with pytest.raises(CoverageError, match="first would keep 2 experts but its router picks 3"):
        check_kept_experts(["first", "second"], [3, 4], WIDTHS_LE)
    with pytest.raises(CoverageError, match="second would keep 4 experts but its router picks 5"):
        check_kept_experts(["first", "second"], [2, 5], WIDTHS_LE)
