"""The refit of all projections of an expert, compared with sums over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_coverage_plugin.core import gauss_newton
from moe_coverage_plugin.core.gauss_newton import Problem, Tokens, Weights
from moe_coverage_plugin.core.reconstruction import RIDGES
from moe_coverage_plugin.core.refit import FEWEST_TOKENS, refit, token_bytes
from tests.core.pruned_experts import Expert, Fit, Rows, outputs, refit_all, swiglu
from tests.peak import Peak

# --- better on held-back tokens, or nothing


@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    biased=st.booleans(),
    hidden=st.integers(1, 7),
    channels=st.integers(2, 9),
    kept=st.integers(1, 8),
    fitted=st.integers(FEWEST_TOKENS, 40),
    held=st.integers(FEWEST_TOKENS, 20),
)
def test_held_back_tokens_are_never_worse(
    seed: int, gated: bool, biased: bool, hidden: int, channels: int, kept: int, fitted: int, held: int
):
    expert = Expert(seed, gated, biased, hidden, channels, min(kept, channels - 1), fitted, held)
    found = expert.refit()
    if found is None:
        return
    assert [each.shape for each in found.rows] == [each.shape for each in expert.rows]
    assert found.down_HN.shape == expert.down_HN.shape
    assert expert.error(found.rows, found.down_HN) < expert.unfitted_error


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_most_pruned_experts_get_closer(gated: bool, biased: bool):
    """The property above would also hold if nothing was ever fitted."""
    experts = [Expert(seed, gated, biased, fitted=200, held=60) for seed in range(12)]
    found = [(expert, fit) for expert in experts if (fit := expert.refit()) is not None]
    assert len(found) >= 10
    ratios = [expert.error(fit.rows, fit.down_HN) / expert.unfitted_error for expert, fit in found]
    assert sorted(ratios)[len(ratios) // 2] < 0.8


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_target_that_other_rows_reach_is_almost_reached(gated: bool, biased: bool):
    expert = Expert(1, gated, biased, hidden=6, kept=4, fitted=200, held=60)
    near = [each + 0.05 * expert.randn(*each.shape) for each in expert.rows]
    expert.target_MH = outputs(expert, near, expert.biases, expert.down_HN)
    found = expert.refit()
    assert found is not None
    assert expert.error(found.rows, found.down_HN) < 0.05 * expert.unfitted_error


def test_columns_are_solved_for_with_the_new_rows():
    """They have the least error on all tokens, with a ridge that held-back tokens chose."""
    expert = Expert(fitted=200, held=60)
    found = expert.refit()
    assert found is not None
    identity_NN = torch.eye(expert.kept, dtype=torch.float64)
    a_MN = expert.tokens.weight_M[:, None] * outputs(expert, found.rows, expert.biases, identity_NN)
    left_MH = expert.tokens.weight_M[:, None] * expert.target_MH - a_MN @ expert.down_HN.T
    gram_NN = a_MN.T @ a_MN
    solutions = [
        expert.down_HN
        + torch.linalg.solve(gram_NN + ridge * gram_NN.diagonal().mean() * identity_NN, a_MN.T @ left_MH).T
        for ridge in RIDGES[:-1]
    ]
    distances = [float((found.down_HN - each).abs().max()) for each in solutions]
    assert min(distances) < 1e-9
    both = [expert.error(found.rows, found.down_HN, held) for held in (True, False)]
    assert sum(both) < sum(expert.error(found.rows, expert.down_HN, held) for held in (True, False))


# --- nothing


@pytest.mark.parametrize(("fitted", "held"), [(0, 40), (40, 0), (FEWEST_TOKENS - 1, 40), (40, FEWEST_TOKENS - 1)])
def test_too_few_tokens_on_one_side(fitted: int, held: int):
    assert Expert(fitted=fitted, held=held).refit() is None


def test_the_fewest_tokens_that_are_enough():
    """Otherwise the test above could pass for another reason."""
    expert = Expert(kept=4, fitted=FEWEST_TOKENS, held=FEWEST_TOKENS)
    expert.tokens = expert.tokens._replace(x_MH=expert.tokens.x_MH[:1].expand(2 * FEWEST_TOKENS, -1))
    expert.target_MH = expert.target_MH[:1].expand(2 * FEWEST_TOKENS, -1)
    assert expert.refit() is not None


def test_a_target_that_is_reached_already():
    expert = Expert()
    expert.target_MH = outputs(expert, expert.rows, expert.biases, expert.down_HN)
    assert expert.refit() is None


def test_held_back_tokens_that_no_step_helps():
    """Fitted tokens want another output for the inputs of which held-back tokens want to keep the old one."""
    expert = Expert(fitted=40, held=40)
    held_M = torch.arange(80) >= 40
    expert.tokens = Rows(expert.tokens.x_MH[:40].repeat(2, 1), expert.tokens.weight_M[:40].repeat(2), held_M)
    reached_MH = outputs(expert, expert.rows, expert.biases, expert.down_HN)
    expert.target_MH = torch.where(held_M[:, None], reached_MH, reached_MH + expert.randn(80, 5))
    assert expert.refit() is None


@pytest.mark.parametrize("what", ["target", "tokens"])
def test_values_that_are_not_finite_change_nothing(what: str):
    expert = Expert()
    if what == "target":
        expert.target_MH[3] = torch.nan
    else:
        expert.tokens.x_MH[3] = torch.inf
    assert expert.refit() is None


@pytest.mark.parametrize("factor", [0.0, 1e-200])
def test_weights_that_are_too_small_for_a_direction(factor: float):
    """Squares underflow, and 0 / 0 must not become NaN in the weights."""
    expert = Expert()
    expert.down_HN = factor * expert.down_HN
    found = expert.refit()
    assert found is None or all(bool(each.isfinite().all()) for each in (*found.rows, found.down_HN))


# --- what must not matter


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
def test_dtypes_are_kept(weight: torch.dtype, tokens: torch.dtype):
    """The fit is in float32 or wider, so rounding is that of the weights."""
    expert = Expert(biased=True, fitted=200, held=60)
    exact = expert.refit()
    before = expert.unfitted_error
    expert.rows = [each.to(weight) for each in expert.rows]
    expert.biases = [None if each is None else each.to(weight) for each in expert.biases]
    expert.down_HN, expert.target_MH = expert.down_HN.to(weight), expert.target_MH.to(tokens)
    expert.tokens = Rows(expert.tokens.x_MH.to(tokens), expert.tokens.weight_M.to(tokens), expert.tokens.held_M)
    found = expert.refit()
    assert exact is not None
    assert found is not None
    assert all(each.dtype == weight for each in (*found.rows, found.down_HN))
    wide = Expert(biased=True, fitted=200, held=60)
    error = wide.error([each.double() for each in found.rows], found.down_HN.double())
    assert error == pytest.approx(wide.error(exact.rows, exact.down_HN), rel=0.05)
    assert error < 0.9 * before


class TensorCores(TorchDispatchMode):
    """Rounds the operands of float32 products to TF32 where a GPU would."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)

    def __init__(self) -> None:
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
            *others, left, right = args
            args = (*others, self._round(left), self._round(right))
        return func(*args, **(kwargs or {}))

    def _round(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32:
            return values
        self.rounded += 1
        # to nearest: of 23 bits behind the point, 10 are left
        return ((values.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_products_on_tensor_cores_fit_as_well(gated: bool, tokens: torch.dtype):
    """Whole fits of 16-bit tokens are in TF32, of others the directions only."""
    experts = [Expert(seed, gated, hidden=24, channels=48, kept=32, fitted=400, held=130) for seed in range(16)]
    for each in experts:
        each.rows, each.down_HN = [row.float() for row in each.rows], each.down_HN.float()
        each.tokens = Rows(each.tokens.x_MH.to(tokens), each.tokens.weight_M.float(), each.tokens.held_M)
    exact = refit_all(experts)
    with TensorCores() as cores:
        found = refit_all(experts)
    assert cores.rounded
    changes = []
    for expert, one, other in zip(experts, found, exact, strict=True):
        assert one is not None
        assert other is not None
        assert not torch.equal(one.down_HN, other.down_HN)
        error = [expert.error([row.double() for row in fit.rows], fit.down_HN.double()) for fit in (one, other)]
        changes.append(error[0] / error[1] - 1)
    assert abs(sum(changes) / len(changes)) < 1e-4
    *others, largest = sorted(map(abs, changes))
    assert max(others) < 5e-4
    # held-back tokens of one expert find two steps equally good, and rounding decides between them
    assert largest < 2e-3


@pytest.mark.parametrize("seed", range(4))
def test_operands_in_bfloat16_fit_as_well(seed: int):
    """As a fit of the same tokens in float32, both rounded to the dtype of the weights."""

    def rounded() -> Expert:
        expert = Expert(seed, hidden=64, channels=96, kept=56, fitted=1500, held=500)
        tokens, scale_H = expert.tokens, torch.logspace(-0.7, 0.7, 64, dtype=torch.float64)
        expert.tokens = Rows((tokens.x_MH * scale_H).bfloat16(), tokens.weight_M.float(), tokens.held_M)
        expert.rows, expert.down_HN = [each.bfloat16() for each in expert.rows], expert.down_HN.bfloat16()
        return expert

    def error(fit: Fit | None) -> float:
        assert fit is not None
        expert, rows = rounded(), [each.bfloat16().double() for each in fit.rows]
        expert.tokens = Rows(expert.tokens.x_MH.double(), expert.tokens.weight_M.double(), expert.tokens.held_M)
        return expert.error(rows, fit.down_HN.bfloat16().double())

    exact = rounded()
    exact.tokens = exact.tokens._replace(x_MH=exact.tokens.x_MH.float())
    exact.rows, exact.down_HN = [each.float() for each in exact.rows], exact.down_HN.float()
    assert error(rounded().refit()) == pytest.approx(error(exact.refit()), rel=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
def test_fits_on_a_gpu_are_those_of_the_cpu(tokens: torch.dtype):
    """Directions are in TF32 there, so the errors are compared, as above."""
    changes = []
    for seed in range(8):
        on_cpu, on_gpu = (Expert(seed, hidden=64, channels=96, kept=56, fitted=1500, held=500) for _ in range(2))
        for expert, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
            x_MH, weight_M, held_M = expert.tokens
            expert.tokens = Rows(x_MH.to(device, tokens), weight_M.to(device, torch.float32), held_M.to(device))
            expert.rows = [each.to(device, torch.bfloat16) for each in expert.rows]
            expert.down_HN = expert.down_HN.to(device, torch.bfloat16)
            expert.target_MH = expert.target_MH.to(device, torch.float32)
        fits = [expert.refit() for expert in (on_cpu, on_gpu)]
        exact = Expert(seed, hidden=64, channels=96, kept=56, fitted=1500, held=500)
        errors = []
        for fit in fits:
            assert fit is not None
            errors.append(exact.error([each.cpu().double() for each in fit.rows], fit.down_HN.cpu().double()))
        changes.append(errors[1] / errors[0] - 1)
    assert abs(sum(changes) / len(changes)) < 5e-4
    assert max(map(abs, changes)) < 5e-3


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_tokens_of_routing_weight_zero_do_not_matter(scale: float):
    """Of any size, on both sides."""
    expert = Expert(biased=True)
    expected = expert.refit()
    tokens, extra = expert.tokens, 30
    expert.tokens = Rows(
        torch.cat([tokens.x_MH, scale * expert.randn(extra, expert.hidden)]),
        torch.cat([tokens.weight_M, torch.zeros(extra, dtype=torch.float64)]),
        torch.cat([tokens.held_M, torch.arange(extra) % 2 == 0]),
    )
    expert.target_MH = torch.cat([expert.target_MH, scale * expert.randn(extra, expert.hidden)])
    assert_same(expert.refit(), expected)


def test_the_order_of_tokens_does_not_matter():
    expert = Expert(gated=False)
    expected = expert.refit()
    order_M = torch.randperm(len(expert.target_MH), generator=expert.generator)
    expert.tokens = Rows(*(each[order_M] for each in expert.tokens))
    expert.target_MH = expert.target_MH[order_M]
    assert_same(expert.refit(), expected)


@given(seed=st.integers(0, 100), scale=st.sampled_from([2.0**-20, 2.0**20]))
def test_the_scale_of_routing_weights_does_not_matter(seed: int, scale: float):
    expert = Expert(seed)
    expected = expert.refit()
    expert.tokens = expert.tokens._replace(weight_M=scale * expert.tokens.weight_M)
    assert_same(expert.refit(), expected)


def test_inputs_are_not_modified():
    expert, unchanged = Expert(biased=True), Expert(biased=True)
    assert expert.refit() is not None
    assert all(map(torch.equal, expert.rows, unchanged.rows))
    assert all(map(torch.equal, expert.tokens, unchanged.tokens))
    assert torch.equal(expert.down_HN, unchanged.down_HN)
    assert torch.equal(expert.target_MH, unchanged.target_MH)


def test_weights_that_require_gradients_get_results_without():
    expert = Expert()
    expert.rows = [each.requires_grad_() for each in expert.rows]
    expert.down_HN = expert.down_HN.detach().requires_grad_()
    found = expert.refit()
    assert found is not None
    assert not any(each.requires_grad for each in (*found.rows, found.down_HN))


def assert_same(found: Fit | None, expected: Fit | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        for one, other in zip((*found.rows, found.down_HN), (*expected.rows, expected.down_HN), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


# --- memory


@pytest.mark.parametrize(("hidden", "channels", "kept"), [(128, 48, 40), (64, 96, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_token_takes_as_many_bytes_as_are_counted(dtype: torch.dtype, hidden: int, channels: int, kept: int):
    """Of many tokens, beside which matrices are small; 24 bytes a channel, and 8 of a hidden state in 16 bits."""
    experts, tokens, wide = 2, 8000, torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(0)
    weights = Weights(
        torch.randn(experts, 2 * kept, hidden, generator=generator).to(dtype),
        None,
        torch.randn(experts, hidden, kept, generator=generator).to(dtype),
    )
    with Peak() as peak:
        sides = []
        for count in (tokens * 3 // 4, tokens // 4):
            x_EMH = torch.randn(experts, count, hidden, generator=generator, dtype=wide).to(dtype)
            side = Tokens(x_EMH, torch.ones(experts, count), torch.full((experts,), count))
            sides.append(Problem(side, torch.randn(experts, count, hidden, generator=generator, dtype=wide)))
            del x_EMH, side
        refit(weights, *sides, swiglu)
    counted = experts * tokens * token_bytes(hidden, channels, dtype)
    assert 0.7 * counted < peak.bytes < counted
    if dtype == torch.bfloat16:
        assert token_bytes(hidden, channels, dtype) == 8 * hidden + 24 * channels


# --- experts together


@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    biased=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4),
    bad=st.integers(0, 4),
)
def test_experts_do_not_change_each_other(
    seed: int, gated: bool, biased: bool, sizes: list[tuple[int, int]], bad: int
):
    """With unequal numbers of tokens, some with too few or none, and one with values that are not finite.

    After few steps: conjugate gradients that are close to the minimum amplify rounding.
    """
    experts = [Expert(seed + index, gated, biased, fitted=one, held=two) for index, (one, two) in enumerate(sizes)]
    if bad < len(experts) and len(experts[bad].tokens.x_MH):
        experts[bad].tokens.x_MH[0] = torch.nan
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gauss_newton, "STEPS", 3)
        found = refit_all(experts)
        for expert, fit in zip(experts, found, strict=True):
            assert_same(fit, expert.refit())
    if bad < len(experts) and len(experts[bad].tokens.x_MH):
        assert found[bad] is None
    assert all(fit is None for fit, each in zip(found, sizes, strict=True) if min(each) < FEWEST_TOKENS)
