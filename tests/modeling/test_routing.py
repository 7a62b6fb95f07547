"""Rows of tokens and experts: their order, their sums, and the gradients of both."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_coverage_plugin.modeling.routing import Routing

HIDDEN = 3


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Different experts of each token, their weights, and the number of experts."""
    experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    return ids_TK, torch.rand(tokens, top_k, generator=generator, dtype=torch.float64), experts


@given(routings())
def test_rows_are_sorted_by_expert_then_slot_then_token(drawn: tuple[Tensor, Tensor, int]) -> None:
    ids_TK, weights_TK, experts = drawn
    routing = Routing.of(ids_TK, weights_TK, experts, None)
    expected = sorted(
        (int(ids_TK[token, slot]), slot, token) for token in range(len(ids_TK)) for slot in range(ids_TK.shape[1])
    )
    assert routing.tokens_M.tolist() == [token for _, _, token in expected]
    assert routing.lengths_E.tolist() == [sum(each == expert for each, _, _ in expected) for expert in range(experts)]
    assert routing.routing_weights_M.tolist() == [float(weights_TK[token, slot]) for _, slot, token in expected]
    # by slot, then by token, rows are the flattened transposed table
    assert torch.equal(routing.by_slot(routing.routing_weights_M), weights_TK.T)


@given(routings())
def test_rows_and_their_sums_are_those_of_plain_indexing_with_gradients(drawn: tuple[Tensor, Tensor, int]) -> None:
    ids_TK, weights_TK, experts = drawn
    routing = Routing.of(ids_TK, weights_TK, experts, None)
    values_TH = torch.randn(len(ids_TK), HIDDEN, dtype=torch.float64, requires_grad=True)
    rows_MH = routing.rows(values_TH)
    assert torch.equal(rows_MH, values_TH[routing.tokens_M])
    summed_TH = routing.over_slots(rows_MH.square())
    expected_TH = torch.zeros_like(values_TH).index_add(0, routing.tokens_M, values_TH[routing.tokens_M].square())
    assert torch.allclose(summed_TH, expected_TH)
    grad_TH = torch.randn_like(values_TH)
    found, expected = (torch.autograd.grad(sums, values_TH, grad_TH)[0] for sums in (summed_TH, expected_TH))
    assert torch.allclose(found, expected)
    assert summed_TH.dtype == values_TH.dtype


def test_numerical_gradients() -> None:
    routing = Routing.of(torch.tensor([[2, 0], [0, 1], [2, 1]]), torch.ones(3, 2), 4, None)
    assert torch.autograd.gradcheck(routing.rows, torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(
        routing.over_slots, torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)
    )
