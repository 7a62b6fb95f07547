"""Samples of each expert's tokens, compared with loops over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.calibration import token_sample
from moe_coverage_plugin.calibration.token_sample import TokenSample
from moe_coverage_plugin.core.refit import Tokens
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers
from tests.calibration.brute_force import EXPERTS, batches_of, open_stock, padded_with_prompts, save_float64
from tests.calibration.routed_rows import Row, rows_of, show

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


def sampled(model, batches, held, most: int) -> tuple[MoELayer, TokenSample]:
    layer = find_moe_layers(model)[1]
    sample = TokenSample(layer, most, len(batches))
    show(model, layer, batches, held, sample.observe)
    return layer, sample


def matching(rows: list[Row], x_H: Tensor, weight: Tensor, held: Tensor) -> list[int]:
    """Indices of the rows that are this token."""
    return [
        index
        for index, row in enumerate(rows)
        if torch.allclose(row.x_H, x_H, rtol=1e-10) and torch.allclose(row.weight, weight) and row.held == bool(held)
    ]


def test_a_sample_of_all_tokens_has_each_once(model, batches, held):
    """With its input, its routing weight and its flag; without padding."""
    layer, sample = sampled(model, batches, held, ALL)
    rows_E = rows_of(model, batches, held)[1]
    for expert in range(layer.num_experts):
        tokens = sample.tokens(expert)
        assert tokens is not None
        assert len(tokens.x_MH) == len(tokens.weight_M) == len(tokens.held_M) == len(rows_E[expert])
        found = [matching(rows_E[expert], *token) for token in zip(*tokens, strict=True)]
        assert sorted(found) == [[index] for index in range(len(rows_E[expert]))]


@pytest.mark.parametrize("most", [1, 4, 7, 12])
def test_at_most_so_many_tokens_spread_over_all_batches(model, batches, held, most: int):
    """Rounded up to the same number for each batch."""
    layer, sample = sampled(model, batches, held, most)
    per_batch = -(-most // len(batches))
    rows_E = rows_of(model, batches, held)[1]
    for expert in range(layer.num_experts):
        tokens = sample.tokens(expert)
        assert tokens is not None
        found = [matching(rows_E[expert], *token) for token in zip(*tokens, strict=True)]
        assert all(len(each) == 1 for each in found)
        assert len({each[0] for each in found}) == len(found) < most + len(batches)
        of_batch = [rows_E[expert][each[0]].batch for each in found]
        for number in range(len(batches)):
            available = sum(row.batch == number for row in rows_E[expert])
            assert of_batch.count(number) == min(available, per_batch)


def test_tokens_of_a_batch_are_spread_over_it(model):
    """Rows of an expert are in the order of slots, so the first ones would all be of one slot."""
    batch = batches_of(padded_with_prompts(labelled=False), 4)[0]
    held = [torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)]
    layer, sample = sampled(model, [batch], held, 3)
    _, everything = sampled(model, [batch], held, ALL)
    for expert in range(layer.num_experts):
        few, every = sample.tokens(expert), everything.tokens(expert)
        assert few is not None
        assert every is not None
        rows = [int((every.x_MH == x_H).all(-1).nonzero()[0]) for x_H in few.x_MH]
        assert rows == [number * len(every.x_MH) // 3 for number in range(3)]


def test_an_expert_without_tokens_has_none(model):
    one = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}
    _, sample = sampled(model, [one], [torch.tensor([True, False])], ALL)
    found = [sample.tokens(expert) for expert in range(EXPERTS)]
    reached = [tokens for tokens in found if tokens is not None]
    assert len(reached) == 2
    assert all(tokens.held_M.tolist() == [True] for tokens in reached)


def test_samples_keep_no_graph(model, batches, held):
    _, sample = sampled(model.requires_grad_(True), batches, held, 4)
    tokens = sample.tokens(0)
    assert tokens is not None
    assert not any(each.requires_grad for each in tokens)


def test_a_rank_without_tokens_gets_those_of_others_on_its_device(model, monkeypatch: pytest.MonkeyPatch):
    """Ranks exchange tokens in CPU memory; a device without values stands for a card."""
    tokens = Tokens(torch.ones(3, 4), torch.ones(3), torch.ones(3).bool())
    sample = TokenSample(layer := find_moe_layers(model)[0], ALL, 1)
    held = [torch.tensor([False])]
    nothing = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[0]])}

    def on_card(trace: ExpertTrace, held_T: Tensor) -> None:
        sample.observe(trace._replace(x_MH=trace.x_MH.to("meta")), held_T)

    show(model, layer, [nothing], held, on_card)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(token_sample, "gather_over_ranks", lambda own: [own, [tokens]])
    found = sample.tokens(0)
    assert found is not None
    assert {each.device.type for each in found} == {"meta"}
    assert found.x_MH.shape == (3, 4)
