"""The Gauss-Newton step of pruned experts, compared with autograd, explicit Jacobians and sums over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.core import gauss_newton
from moe_coverage_plugin.core.gauss_newton import Factors, Rows, Weights, inverse_factors
from tests.core.pruned_experts import Expert, outputs, problem


def linearised(expert: Expert):
    """The weighted output for the fitted tokens as a function of all rows, and what it should add."""
    side_M = ~expert.tokens.held_M
    weight_M1 = expert.tokens.weight_M[side_M, None]

    def weighted(rows_OH: Tensor) -> Tensor:
        rows = list(rows_OH.split(expert.kept))
        return weight_M1 * outputs(expert, rows, expert.biases, expert.down_HN)[side_M]

    rows_OH = torch.cat(expert.rows)
    return weighted, rows_OH, weight_M1 * expert.target_MH[side_M] - weighted(rows_OH)


def step(expert: Expert) -> Tensor:
    biases = [bias for bias in expert.biases if bias is not None]
    rows_OH, side = torch.cat(expert.rows), problem([expert], held=False)
    weights = Weights(rows_OH[None], torch.cat(biases)[None] if biases else None, expert.down_HN[None])
    changes = gauss_newton.gauss_newton_steps(Rows.of(side, torch.float64), weights, expert.act)
    return changes[-1][0] if changes else torch.zeros_like(rows_OH)


KINDS = pytest.mark.parametrize(
    "kind",
    [{}, {"biased": True}, {"gated": False}, {"gated": False, "biased": True}, {"kept": 1}, {"hidden": 1, "kept": 2}],
    ids=str,
)


def preconditioned(expert: Expert, gradient_OH: Tensor) -> Tensor:
    """``(L + lambda I)^-1 q (S + lambda I)^-1``, with sums over tokens one by one."""
    inputs_HH, slopes_OO, parts = 0.0, 0.0, 1 + expert.gated
    for x_H, weight, held in zip(*expert.tokens, strict=True):
        if not held:
            biases = [0.0 if bias is None else bias for bias in expert.biases]
            h_O = torch.cat([row @ x_H + bias for row, bias in zip(expert.rows, biases, strict=True)]).requires_grad_()
            (slope_O,) = torch.autograd.grad(expert.act(h_O[None]).sum(), h_O)
            inputs_HH += weight**2 * torch.outer(x_H, x_H)
            slopes_OO += weight**2 * x_H.square().mean() * torch.outer(slope_O, slope_O)
    outputs_NN = expert.down_HN.T @ expert.down_HN
    inverses = []
    for matrix in (slopes_OO * outputs_NN.repeat(parts, parts), inputs_HH):
        ridge = matrix.diagonal().mean() * len(matrix) / expert.fitted
        inverses.append(torch.linalg.inv(matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype)))
    return inverses[0] @ gradient_OH @ inverses[1]


@KINDS
def test_first_step_equals_autograd(monkeypatch: pytest.MonkeyPatch, kind: dict):
    """With ``q = J^T r`` and the preconditioned ``p``, the first step is ``p (q p) / |J p|^2``."""
    monkeypatch.setattr(gauss_newton, "STEPS", 1)
    monkeypatch.setattr(gauss_newton, "DAMPING", 0.0)
    expert = Expert(**kind)
    weighted, rows_OH, left_MH = linearised(expert)
    _, gradient_OH = torch.autograd.functional.vjp(weighted, rows_OH, left_MH)
    direction_OH = preconditioned(expert, gradient_OH)
    _, change_MH = torch.autograd.functional.jvp(weighted, rows_OH, direction_OH)
    expected_OH = direction_OH * (gradient_OH * direction_OH).sum() / change_MH.square().sum()
    torch.testing.assert_close(step(expert), expected_OH, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_inputs_of_unequal_size_need_no_more_steps(monkeypatch: pytest.MonkeyPatch, seed: int):
    """Without the factors, the steps follow the largest directions of hidden states, and need twice as many."""
    expert = Expert(seed, hidden=6, fitted=200)
    scale_H = torch.logspace(-0.5, 0.5, 6, dtype=torch.float64)
    expert.tokens = expert.tokens._replace(x_MH=expert.tokens.x_MH * scale_H)
    expert.rows = [each / scale_H for each in expert.rows]
    weighted, rows_OH, left_MH = linearised(expert)
    monkeypatch.setattr(gauss_newton, "DAMPING", 0.0)

    def error() -> float:
        _, change_MH = torch.autograd.functional.jvp(weighted, rows_OH, step(expert))
        return float((left_MH - change_MH).square().sum())

    with_factors = error()
    monkeypatch.setattr(gauss_newton, "STEPS", 2 * gauss_newton.STEPS)
    identity = Factors(*(torch.eye(size, dtype=torch.float64)[None] for size in rows_OH.shape))
    monkeypatch.setattr(gauss_newton, "inverse_factors", lambda *_: identity)
    assert with_factors < error()


def test_factors_without_an_inverse_change_no_direction():
    """One expert has factors of four times the identity, the other none that can be inverted."""
    identities = [torch.eye(size, dtype=torch.float64) for size in (3, 2)]
    broken = [torch.full((3, 3), torch.nan, dtype=torch.float64), -identities[1]]
    factors = Factors(*(torch.stack([4 * each, other]) for each, other in zip(identities, broken, strict=True)))
    # as many tokens as would make ridges too small to see
    found = inverse_factors(factors, torch.tensor([10**18, 10**18]))
    for inverse_EAA, identity_AA in zip(found, identities, strict=True):
        torch.testing.assert_close(inverse_EAA, torch.stack([identity_AA / 2, identity_AA]))


@KINDS
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_many_steps_equal_least_squares_of_the_jacobian(monkeypatch: pytest.MonkeyPatch, kind: dict, damping: float):
    """With rows of the damping below the explicit Jacobian, ``mu`` relative to the mean of its squared columns."""
    monkeypatch.setattr(gauss_newton, "STEPS", 400)
    monkeypatch.setattr(gauss_newton, "DAMPING", damping)
    expert = Expert(**kind)
    weighted, rows_OH, left_MH = linearised(expert)
    jacobian = torch.autograd.functional.jacobian(weighted, rows_OH).reshape(left_MH.numel(), rows_OH.numel())
    strength = (damping * jacobian.square().sum(0).mean()).sqrt()
    system = torch.cat([jacobian, strength * torch.eye(rows_OH.numel(), dtype=torch.float64)])
    target = torch.cat([left_MH.flatten(), torch.zeros(rows_OH.numel(), dtype=torch.float64)])
    expected = torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution
    torch.testing.assert_close(step(expert), expected.reshape(rows_OH.shape), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gated", [False, True])
def test_each_step_of_conjugate_gradients_fits_the_linearised_output_better(
    monkeypatch: pytest.MonkeyPatch, gated: bool
):
    monkeypatch.setattr(gauss_newton, "DAMPING", 0.0)
    expert = Expert(gated=gated)
    weighted, rows_OH, left_MH = linearised(expert)
    errors = []
    for steps in range(6):
        monkeypatch.setattr(gauss_newton, "STEPS", steps)
        _, change_MH = torch.autograd.functional.jvp(weighted, rows_OH, step(expert))
        errors.append(float((left_MH - change_MH).square().sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(float(left_MH.square().sum()))
