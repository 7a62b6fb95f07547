"""Inputs of experts over all batches, compared with loops over the tokens of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.calibration import layer_inputs
from moe_coverage_plugin.calibration.layer_inputs import ExpertTokens, LayerInputs
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.calibration.brute_force import EXPERTS, batches_of, open_stock, padded_with_prompts, save_float64
from tests.calibration.routed_rows import Row, inputs_of, rows_of

ALL = 10_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_stock(save_float64(tmp_path_factory.mktemp("source"), "qwen3_moe"), linear=True)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Tensor]]:
    """Four samples of unequal length, padded on the right, one in each batch."""
    return batches_of(padded_with_prompts(labelled=False), 1)


@pytest.fixture(scope="module")
def held(batches) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(batch["input_ids"].numel(), generator=generator) < 0.3 for batch in batches]


@pytest.fixture(scope="module")
def seen(model, batches, held) -> tuple[LayerInputs, list[list[Row]]]:
    """The inputs of the second layer, and its rows by loops."""
    return inputs_of(model, find_moe_layers(model)[1], batches, held), rows_of(model, batches, held)[1]


def matching(rows: list[Row], x_H: Tensor, weight: Tensor, held: Tensor) -> list[int]:
    """Indices of the rows that are this token."""
    return [
        index
        for index, row in enumerate(rows)
        if torch.allclose(row.x_H, x_H, rtol=1e-10) and torch.allclose(row.weight, weight) and row.held == bool(held)
    ]


def test_tokens_have_each_token_once(seen):
    """With its input, its routing weight and its part; without padding."""
    inputs, rows_E = seen
    assert inputs.count_tokens().tolist() == list(map(len, rows_E))
    for expert in range(EXPERTS):
        tokens = inputs.tokens(expert)
        found = []
        for held, side in zip((False, True), tokens.sides(), strict=True):
            found += [matching(rows_E[expert], *token, torch.tensor(held)) for token in zip(*side, strict=True)]
        assert sorted(found) == [[index] for index in range(len(rows_E[expert]))]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_tokens_of_an_expert_that_has_many_are_spread_over_all(seen, monkeypatch: pytest.MonkeyPatch, rows: int):
    inputs, rows_E = seen
    every = [inputs.tokens(expert) for expert in range(EXPERTS)]
    monkeypatch.setattr(layer_inputs, "ROWS", rows)
    assert max(map(len, rows_E)) > rows
    assert inputs.count_tokens().tolist() == [min(len(each), rows) for each in rows_E]
    for expert, (x_MH, weight_M, fitted) in enumerate(every):
        few = inputs.tokens(expert)
        chosen = spread(len(x_MH), rows)
        assert torch.equal(few.x_MH, x_MH[chosen])
        assert torch.equal(few.weight_M, weight_M[chosen])
        assert few.fitted == sum(index < fitted for index in chosen)


def spread(length: int, most: int) -> list[int]:
    """At most ``most`` numbers below ``length``."""
    count = min(most, length)
    return [number * length // count for number in range(count)]


@pytest.mark.parametrize("multiple", [1, 5])
@pytest.mark.parametrize("most", [1, 4, 7, ALL])
def test_a_sample_is_spread_over_all_tokens(seen, monkeypatch: pytest.MonkeyPatch, most: int, multiple: int):
    """Of several experts together, in any order, with zeros behind those that have fewer tokens."""
    inputs, rows_E = seen
    monkeypatch.setattr(layer_inputs, "_multiple", lambda _: multiple)
    experts = [3, 0, 5, 1]
    sides = inputs.sample(experts, most)
    for position, expert in enumerate(experts):
        every = inputs.tokens(expert)
        chosen = spread(len(rows_E[expert]), most)
        parts = (
            [index for index in chosen if index < every.fitted],
            [index for index in chosen if index >= every.fitted],
        )
        for tokens, part in zip(sides, parts, strict=True):
            count = int(tokens.count_E[position])
            assert count == len(part)
            assert torch.equal(tokens.x_EMH[position, :count], every.x_MH[part])
            assert torch.equal(tokens.weight_EM[position, :count], every.weight_M[part])
            assert not tokens.x_EMH[position, count:].any()
            assert not tokens.weight_EM[position, count:].any()
    for tokens in sides:
        more = tokens.x_EMH.shape[1] - max(tokens.count_E.tolist())
        assert 0 <= more < multiple
        assert tokens.x_EMH.shape[1] % multiple == 0


def test_an_expert_without_tokens(model):
    one = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}
    inputs = inputs_of(model, find_moe_layers(model)[1], [one], [torch.tensor([True, False])])
    counts = inputs.count_tokens()
    assert sorted(counts.tolist()) == [0] * (EXPERTS - 2) + [1, 1]
    fitted, held = inputs.sample(range(EXPERTS), ALL)
    assert torch.equal(held.count_E, counts)
    assert fitted.count_E.tolist() == [0] * EXPERTS
    for expert, count in enumerate(counts.tolist()):
        tokens = inputs.tokens(expert)
        assert (len(tokens.x_MH), tokens.fitted) == (count, 0)


def test_no_graph_is_kept(model, batches, held):
    inputs = inputs_of(model.requires_grad_(True), find_moe_layers(model)[1], batches, held)
    assert not inputs.x_TH.requires_grad
    assert not inputs.weights_TK.requires_grad


def test_tokens_are_stored_on_one_device_and_used_on_another(monkeypatch: pytest.MonkeyPatch):
    """Hidden states that do not fit on a card are in CPU memory; a device without values stands for the card."""
    inputs = LayerInputs(2, 3, torch.device("cpu"))
    moved: list[torch.device] = []
    to: Callable[..., Any] = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **rest: (moved.append(args[0]), to(self, *args, **rest))[1])
    inputs.add(torch.ones(3, 4), torch.tensor([[0], [1], [0]]), torch.ones(3, 1), torch.zeros(3).bool(), None)
    inputs.device = torch.device("meta")
    tokens = inputs.tokens(0)
    assert {tokens.x_MH.device.type, tokens.weight_M.device.type} == {"meta"}
    assert tokens.x_MH.shape == (2, 4)
    assert inputs.x_TH.device == torch.device("cpu")
    assert moved.count(torch.device("meta")) == 2


def test_a_rank_without_tokens_gets_those_of_others_on_its_device(monkeypatch: pytest.MonkeyPatch):
    """Ranks exchange tokens in CPU memory, and each gives its part of the sample."""
    inputs = LayerInputs(2, 3, torch.device("cpu"))
    inputs.add(torch.ones(3, 4), torch.zeros(3, 1).long(), torch.ones(3, 1), torch.zeros(3).bool(), None)
    inputs.device = torch.device("meta")
    others = ExpertTokens(torch.ones(3, 4), torch.ones(3), 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(layer_inputs, "gather_over_ranks", lambda own: [own, [others] * len(own)])
    fitted, held = inputs.sample([0, 1], 4)
    assert {each.device.type for side in (fitted, held) for each in side} == {"meta"}
    assert fitted.x_EMH.shape == (2, 2 + 1, 4)
    assert held.x_EMH.shape == (2, 2, 4)


def test_batches_that_are_missing_are_our_own_error():
    inputs = LayerInputs(2, 3, torch.device("cpu"))
    inputs.add(torch.ones(2, 4), torch.zeros(2, 1).long(), torch.ones(2, 1), torch.zeros(2).bool(), None)
    with pytest.raises(AssertionError, match="2 of 3 tokens were added"):
        inputs.count_tokens()
