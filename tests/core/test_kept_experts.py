"""A layer must keep at least as many experts as its router picks."""

from __future__ import annotations

import pytest
import torch

from moe_coverage_plugin.core.kept_experts import check_kept_experts
from moe_coverage_plugin.manifest import CoverageError

WIDTHS_LE = torch.tensor([[0, 4, 0, 8], [1, 1, 1, 1]])


def test_top_k_kept_experts_are_enough() -> None:
    check_kept_experts(["first", "second"], [2, 4], WIDTHS_LE)


def test_fewer_kept_experts_are_an_error_that_names_the_layer() -> None:
    with pytest.raises(CoverageError, match="first would keep 2 experts but its router picks 3"):
        check_kept_experts(["first", "second"], [3, 4], WIDTHS_LE)
    with pytest.raises(CoverageError, match="second would keep 4 experts but its router picks 5"):
        check_kept_experts(["first", "second"], [2, 5], WIDTHS_LE)
