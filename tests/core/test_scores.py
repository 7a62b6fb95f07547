"""How many tokens a score rests on, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.gradients import effective_tokens
from moe_coverage_plugin.core.scores import TOKEN_FLOOR, AttributionScores

terms = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=40)


@given(terms, st.floats(1e-6, 1e6))
def test_effective_tokens_are_between_one_and_all(values: list[float], scale: float):
    terms_T = torch.tensor(values, dtype=torch.float64)
    found = float(effective_tokens(terms_T.sum(), terms_T.square().sum()))
    scaled = float(effective_tokens(scale * terms_T.sum(), scale**2 * terms_T.square().sum()))
    if float(terms_T.square().sum()) == 0:
        assert found == 0
    else:
        assert 1 - 1e-9 <= found <= len(values) * (1 + 1e-9)
        assert scaled == pytest.approx(found)


def test_effective_tokens_of_equal_and_of_one_dominant_term():
    equal_T, dominant_T = torch.full((50,), 0.3), torch.tensor([1e6, *[1.0] * 49])
    assert float(effective_tokens(equal_T.sum(), equal_T.square().sum())) == pytest.approx(50)
    assert float(effective_tokens(dominant_T.sum(), dominant_T.square().sum())) == pytest.approx(1, abs=1e-3)


@pytest.fixture
def scores() -> AttributionScores:
    ones_LE = torch.ones(1, 2, dtype=torch.float64)
    return AttributionScores(
        names=["experts"],
        top_k=[1],
        channel_metric="fisher",
        channels_LEI=torch.ones(1, 2, 8, dtype=torch.float64),
        first_order_LE=ones_LE,
        second_order_LE=ones_LE,
        tokens_LE=torch.tensor([[400, 90]]),
        routing_weight_sum_LE=ones_LE,
        effective_tokens_LE=torch.tensor([[100.0, 10.0]], dtype=torch.float64),
        few_tokens_LE=torch.tensor([[1, 6]]),
    )


def test_says_what_it_would_take(scores: AttributionScores):
    assert scores.certainty == (
        f"7 of 16 channel scores rest on fewer than {TOKEN_FLOOR} effective tokens; a typical one on 10. 4 times as "
        f"much text would give most channels of every expert {TOKEN_FLOOR}"
    )


def test_no_advice_if_there_is_enough_text_or_more_would_not_help(scores: AttributionScores):
    enough = replace(scores, effective_tokens_LE=torch.tensor([[100.0, 50.0]], dtype=torch.float64))
    assert enough.certainty == "7 of 16 channel scores rest on fewer than 32 effective tokens; a typical one on 50"
    unreached = replace(scores, effective_tokens_LE=torch.tensor([[100.0, 0.0]], dtype=torch.float64))
    assert unreached.certainty is not None
    assert "times as much" not in unreached.certainty


def test_nothing_is_said_of_scores_without_gradients(scores: AttributionScores):
    assert replace(scores, few_tokens_LE=None, effective_tokens_LE=None).certainty is None
