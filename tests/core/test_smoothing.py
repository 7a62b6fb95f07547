import math
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moe_coverage_plugin.core.smoothing import smooth
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import Smoothing

METHODS = get_args(Smoothing)
importances = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=12)


@pytest.mark.parametrize("method", METHODS)
@given(values=importances)
@example(values=[2e-203, 9e-300])  # their squares are zero in float64
def test_smoothing_is_monotone_and_keeps_zero(method: Smoothing, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    y = smooth(x, method)
    assert y.dtype == torch.float64
    assert y.shape == x.shape
    assert bool(y.isfinite().all())
    if method != "clip":
        assert bool((y[x == 0] == 0).all())
    by_x = y[x.argsort(stable=True)]
    assert bool((by_x.diff() >= -1e-12 * by_x.max()).all())


@pytest.mark.parametrize("method", ["huber", "clip", "none"])
@given(values=importances)
def test_only_outliers_change(method: Smoothing, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    mean, spread = sum(values) / len(values), 0.5 * math.sqrt(((x - x.mean()) ** 2).mean())
    inliers = x < (mean + spread) * (1 - 1e-9)
    if method == "clip":
        inliers &= x > (mean - spread) * (1 + 1e-9)
    y = smooth(x, method)
    assert torch.equal(y[inliers], x[inliers])


def test_by_hand() -> None:
    # the mean is 2 and the population std is sqrt((2^2 * 3 + 6^2) / 4) = sqrt(12), so delta = 2 + sqrt(3)
    x = torch.tensor([0.0, 0.0, 0.0, 8.0])
    delta = 2 + math.sqrt(3)
    assert smooth(x, "sqrt")[3].item() == pytest.approx(math.sqrt(8))
    assert smooth(x, "log")[3].item() == pytest.approx(math.log(1 + 5 * 8))
    assert smooth(x, "clip").tolist() == pytest.approx([2 - math.sqrt(3)] * 3 + [delta])
    assert smooth(x, "huber")[3].item() == pytest.approx(delta + math.sqrt(delta * (8 - delta)))


@pytest.mark.parametrize("method", METHODS)
def test_equal_values_remain_equal_and_zero_remains_zero(method: Smoothing) -> None:
    assert smooth(torch.zeros(3), method).tolist() == [0.0, 0.0, 0.0]
    equal = smooth(torch.full((3,), 2.0), method)
    assert len(set(equal.tolist())) == 1
    expected = {"none": 2.0, "sqrt": math.sqrt(2), "log": math.log(11), "huber": 2.0, "clip": 2.0}
    assert equal[0].item() == pytest.approx(expected[method])


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_independent_and_negative_values_are_treated_as_zero(method: Smoothing) -> None:
    x_LE = torch.tensor([[1.0, -5.0, 3.0], [100.0, 1.0, 2.0]])
    y_LE = smooth(x_LE, method)
    # means of one row and of several are summed in different orders
    torch.testing.assert_close(y_LE[0], smooth(torch.tensor([1.0, 0.0, 3.0]), method))
    torch.testing.assert_close(y_LE[1], smooth(x_LE[1], method))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_an_error_that_names_the_expert(bad: float) -> None:
    x_LE = torch.ones(2, 3)
    x_LE[1, 2] = bad
    with pytest.raises(CoverageError, match="layer 1 expert 2"):
        smooth(x_LE, "sqrt")
