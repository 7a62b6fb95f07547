import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_coverage_plugin.core.attribution import (
    CHUNK_ROWS,
    expert_contributions,
    finalize_channel_scores,
    segment_sums,
    squares,
)
from moe_coverage_plugin.core.ragged import ExpertWeights, reference_moe
from moe_coverage_plugin.options import ChannelMetric

T, K, E, H, I = 23, 2, 5, 6, 8  # noqa: E741 - the axis letters


class TinyMoE:
    """An MoE layer in float64 whose expert outputs can be scaled separately."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.experts = [ExpertWeights(randn(I, H), randn(I, H), randn(H, I)) for _ in range(E)]
        self.x_TH = randn(T, H)
        weights_TE = randn(T, E).softmax(-1)
        self.weights_TK, self.ids_TK = weights_TE.topk(K, dim=-1)

    def forward(self, factors_E: Tensor) -> Tensor:
        # a factor of an expert's output is the same as a factor of its routing weight
        return reference_moe(self.x_TH, self.ids_TK, self.weights_TK * factors_E[self.ids_TK], self.experts, silu)

    def relative_loss(self, factors_E: Tensor) -> Tensor:
        y_TH = self.forward(torch.ones(E, dtype=torch.float64))
        return ((self.forward(factors_E) - y_TH).square().sum(-1) / y_TH.square().sum(-1)).sum()

    def routed(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs ``[M, H]``, routing weights ``[M]`` and tokens ``[M]`` of the rows routed to an expert."""
        token_M, slot_M = (self.ids_TK == expert).nonzero(as_tuple=True)
        ones_N1 = torch.ones(len(token_M), 1, dtype=torch.float64)
        only_N1 = torch.zeros(len(token_M), 1, dtype=torch.int64)
        z_MH = reference_moe(self.x_TH[token_M], only_N1, ones_N1, [self.experts[expert]], silu)
        return z_MH, self.weights_TK[token_M, slot_M], token_M


def contributions(z_MH: Tensor, routing_weight_M: Tensor, y_NH: Tensor) -> Tensor:
    """First-order and second-order importance ``[2]`` of one expert; row ``m`` belongs to token ``m``."""
    rows = expert_contributions(z_MH, routing_weight_M, y_NH, torch.arange(len(y_NH)))
    return torch.stack([rows.first_order_M.sum(), rows.second_order_M.sum()])


def channel_sums(a_MI: Tensor) -> Tensor:
    return segment_sums(squares(a_MI), torch.tensor([len(a_MI)]))[0]


def closed_forms(moe: TinyMoE) -> tuple[Tensor, Tensor]:
    y_TH = moe.forward(torch.ones(E, dtype=torch.float64))
    both = []
    for expert in range(E):
        z_MH, routing_weight_M, token_M = moe.routed(expert)
        both.append(contributions(z_MH, routing_weight_M, y_TH[token_M]))
    first_E, second_E = torch.stack(both, dim=1)
    return first_E, second_E


@pytest.mark.parametrize("seed", range(3))
def test_second_order_is_the_loss_without_the_expert(seed: int) -> None:
    moe = TinyMoE(seed)
    ablated = []
    for expert in range(E):
        factors_E = torch.ones(E, dtype=torch.float64)
        factors_E[expert] = 0
        ablated.append(moe.relative_loss(factors_E))
    torch.testing.assert_close(closed_forms(moe)[1], torch.stack(ablated), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eps", [0.01, 0.3])
def test_first_order_is_the_gradient_at_the_scaled_point(seed: int, eps: float) -> None:
    moe = TinyMoE(seed)
    factors_E = torch.full((E,), 1 - eps, dtype=torch.float64, requires_grad=True)
    (gradient_E,) = torch.autograd.grad(moe.relative_loss(factors_E), factors_E)
    torch.testing.assert_close(closed_forms(moe)[0], -gradient_E / (2 * eps), rtol=1e-5, atol=0)


def test_first_order_is_the_papers_definition() -> None:
    """The paper's ``-(dL/dz)^T z`` at the scaled outputs is the closed form times ``2 eps (1 - eps)``."""
    moe, eps = TinyMoE(), 0.1
    y_TH = moe.forward(torch.ones(E, dtype=torch.float64))
    scaled, rows = [], []
    output_TH = torch.zeros_like(y_TH)
    for expert in range(E):
        z_MH, routing_weight_M, token_M = moe.routed(expert)
        scaled.append(((1 - eps) * z_MH).requires_grad_())
        rows.append(token_M)
        output_TH = output_TH.index_add(0, token_M, routing_weight_M[:, None] * scaled[-1])
    loss = ((output_TH - y_TH).square().sum(-1) / y_TH.square().sum(-1)).sum()
    gradients = torch.autograd.grad(loss, scaled)
    score_E = torch.stack([-(g_NH * z_MH).sum() for g_NH, z_MH in zip(gradients, scaled, strict=True)])
    torch.testing.assert_close(score_E / (2 * eps * (1 - eps)), closed_forms(moe)[0], rtol=1e-5, atol=0)


def test_first_order_of_all_experts_sums_to_the_number_of_tokens() -> None:
    assert closed_forms(TinyMoE())[0].sum().item() == pytest.approx(T)


def test_contributions_add_over_batches_and_order_does_not_matter() -> None:
    moe = TinyMoE()
    z_MH, routing_weight_M, token_M = moe.routed(0)
    y_NH = moe.forward(torch.ones(E, dtype=torch.float64))[token_M]
    complete = contributions(z_MH, routing_weight_M, y_NH)
    parts = [contributions(z_MH[s], routing_weight_M[s], y_NH[s]) for s in (slice(0, 3), slice(3, None))]
    torch.testing.assert_close(parts[0] + parts[1], complete)
    order = torch.randperm(len(routing_weight_M), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(contributions(z_MH[order], routing_weight_M[order], y_NH[order]), complete)


def test_tokens_with_zero_output_and_experts_without_tokens_contribute_nothing() -> None:
    z_MH = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y_NH = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    # only token 1 contributes: g = 1/2, <g z, y> = 7/2, ||g z||^2 = 25/4, ||y||^2 = 2
    first, second = contributions(z_MH, torch.tensor([1.0, 0.5]), y_NH)
    assert (first.item(), second.item()) == (7 / 4, 25 / 8)
    first, second = contributions(z_MH[:0], torch.ones(0), y_NH[:0])
    assert (first.item(), second.item()) == (0.0, 0.0)
    assert channel_sums(z_MH[:0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_low_precision_inputs_are_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    z_MH, y_NH = (torch.randn(300, 64, generator=generator).to(dtype) for _ in range(2))
    routing_weight_M = torch.rand(300, generator=generator).to(dtype)
    found = contributions(z_MH, routing_weight_M, y_NH)
    assert found.dtype == torch.float64
    exact = contributions(z_MH.double(), routing_weight_M.double(), y_NH.double())
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
    sums_H = channel_sums(z_MH)
    assert sums_H.dtype == torch.float64
    torch.testing.assert_close(sums_H, channel_sums(z_MH.double()), rtol=1e-6, atol=0)


def test_channel_scores_equal_their_definitions() -> None:
    moe = TinyMoE()
    expert = moe.experts[1]
    _, _, token_M = moe.routed(1)
    x_NH = moe.x_TH[token_M]
    a_MI = silu(x_NH @ expert.gate_NH.T) * (x_NH @ expert.up_NH.T)
    sums_I, input_sums_H = channel_sums(a_MI), channel_sums(x_NH)

    def norm(values: Tensor) -> float:
        return math.sqrt(sum(float(value) ** 2 for value in values))

    activation = [norm(a_MI[:, c]) for c in range(I)]
    weight = [(norm(expert.down_HN[:, c]) + norm(expert.up_NH[c]) + norm(expert.gate_NH[c])) / 3 for c in range(I)]
    both = []
    for c in range(I):
        down = sum(abs(float(expert.down_HN[h, c])) * activation[c] for h in range(H))
        up = sum(abs(float(expert.up_NH[c, h])) * norm(x_NH[:, h]) for h in range(H))
        gate = sum(abs(float(expert.gate_NH[c, h])) * norm(x_NH[:, h]) for h in range(H))
        both.append((down + up + gate) / 3)

    expected_scores: dict[ChannelMetric, list[float]] = {
        "activation": activation,
        "weight": weight,
        "weight_activation": both,
    }
    for metric, expected in expected_scores.items():
        scores_I = finalize_channel_scores(metric, sums_I, expert, input_sums_H)
        torch.testing.assert_close(scores_I, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(
        finalize_channel_scores("activation", sums_I), torch.tensor(activation, dtype=torch.float64)
    )


def test_sums_of_segments_and_of_empty_segments() -> None:
    values_MI = torch.arange(12.0).reshape(6, 2)
    sums_EI = segment_sums(values_MI, torch.tensor([2, 0, 3, 1, 0]))
    assert sums_EI.tolist() == [[2, 4], [0, 0], [18, 21], [10, 11], [0, 0]]
    assert sums_EI.dtype == torch.float64


def test_rows_of_several_chunks_use_their_own_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = CHUNK_ROWS + 3
    z_MH, y_TH = (torch.randn(rows, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    token_M = torch.randperm(rows, generator=generator)
    found = expert_contributions(z_MH, torch.ones(rows), y_TH, token_M)
    y_MH = y_TH[token_M]
    torch.testing.assert_close(found.first_order_M, (z_MH * y_MH).sum(-1) / y_MH.square().sum(-1))
    torch.testing.assert_close(found.second_order_M, z_MH.square().sum(-1) / y_MH.square().sum(-1))
