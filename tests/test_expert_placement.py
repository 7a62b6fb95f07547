"""Placement of entire experts on ranks: never worse than an engine's on memory or on work, and close to the best."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin import Manifest
from moe_coverage_plugin.expert_placement import (
    LayerLoads,
    contiguous,
    layer_loads,
    place_experts,
    size_ratio,
    sums,
    total_sizes,
    work_ratio,
)

EXPERTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), min_size=1, max_size=24)
LAYERS = st.lists(EXPERTS, min_size=1, max_size=6)


def loads(layers: Sequence[Sequence[tuple[int, int]]]) -> list[LayerLoads]:
    """Loads of experts with these widths and tokens."""
    return [
        LayerLoads(tuple(width for width, _ in experts), tuple(width * tokens for width, tokens in experts))
        for experts in layers
    ]


def random_layers(layers: int, experts: int, skew: float, seed: int = 0) -> list[LayerLoads]:
    """Widths in blocks of 128, and tokens whose logarithms are normal: a few experts get most of them."""
    chance = random.Random(seed)

    def expert() -> tuple[int, int]:
        tokens = round(1000 * chance.lognormvariate(0, skew))
        return 128 * min(6, max(0, round(chance.gauss(3, 1.5)))), tokens

    return loads([[expert() for _ in range(experts)] for _ in range(layers)])


@given(LAYERS, st.integers(1, 9))
def test_every_expert_has_one_rank_and_neither_measure_is_worse_than_an_engines(
    experts: list[list[tuple[int, int]]], ranks: int
) -> None:
    layers = loads(experts)
    placement = place_experts(layers, ranks)
    assert placement == place_experts(layers, ranks)
    by_engine = [contiguous(len(layer.size_E), ranks) for layer in layers]
    for layer, holders_E, engine_E in zip(layers, placement, by_engine, strict=True):
        assert len(holders_E) == len(layer.size_E)
        assert set(holders_E) <= set(range(ranks))
        busiest = max(sums(layer.work_E, holders_E, ranks))
        assert busiest <= max(sums(layer.work_E, engine_E, ranks))
    sizes = total_sizes(layers, placement, ranks)
    assert sum(sizes) == sum(sum(layer.size_E) for layer in layers)
    assert max(sizes) <= max(total_sizes(layers, by_engine, ranks))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 4))
def test_one_layer_is_within_the_bound_of_longest_first(work_E: list[int], ranks: int) -> None:
    """Graham 1969: at most 4/3 - 1/(3 ranks) of the best, which is found by trying all placements."""
    (placed,) = place_experts([LayerLoads(tuple(work_E), tuple(work_E))], ranks)
    tried = product(range(ranks), repeat=len(work_E))
    best = min(max(sums(work_E, holders_E, ranks)) for holders_E in tried)
    assert 3 * ranks * max(sums(work_E, placed, ranks)) <= (4 * ranks - 1) * best


@given(LAYERS, st.integers(1, 9))
def test_no_rank_waits_for_more_than_one_expert(experts: list[list[tuple[int, int]]], ranks: int) -> None:
    """The bound of any greedy assignment; an engine's placement may be kept if only it balances memory so well."""
    layers = loads(experts)
    for layer, holders_E in zip(layers, place_experts(layers, ranks), strict=True):
        greedy = sum(layer.work_E) / ranks + (1 - 1 / ranks) * max(layer.work_E)
        by_engine = max(sums(layer.work_E, contiguous(len(holders_E), ranks), ranks))
        assert max(sums(layer.work_E, holders_E, ranks)) <= max(greedy, by_engine) + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_balance_of_a_large_model(ranks: int) -> None:
    """48 layers of 128 experts, as in Qwen3-30B-A3B."""
    layers = random_layers(48, 128, skew=0.7)
    placement, by_engine = place_experts(layers, ranks), [contiguous(128, ranks)] * 48
    assert size_ratio(layers, placement, ranks) < min(1.01, size_ratio(layers, by_engine, ranks))
    assert work_ratio(layers, placement, ranks) < 1.03 < work_ratio(layers, by_engine, ranks)
    # stages of a pipeline have some of the layers
    for stage in (slice(0, 24), slice(24, 48)):
        assert size_ratio(layers[stage], placement[stage], ranks) < 1.02


def test_an_expert_that_gets_most_tokens_is_alone_on_its_rank() -> None:
    layers = loads([[(4, 90), (4, 5), (4, 5), (4, 0), (4, 0), (4, 0)]] * 3)
    placement = place_experts(layers, 2)
    for holders_E in placement:
        assert {rank for rank, tokens in zip(holders_E, (90, 5, 5), strict=False) if tokens < 90} == {1 - holders_E[0]}
    # experts without tokens even out the memory
    assert size_ratio(layers, placement, 2) <= 1 + 1 / 18


def test_as_vllm_assigns_experts() -> None:
    assert contiguous(8, 3) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert contiguous(2, 4) == [0, 1]


def test_loads_of_a_checkpoint() -> None:
    names = [f"model.layers.{number}.mlp.experts" for number in (1, 2, 10)]
    widths = {names[0]: [64, 0], names[1]: [32, 96], names[2]: [64, 64]}
    manifest = Manifest("ragged", 128, widths, 32, tokens={names[1]: [7, 2]})
    # the third layer is served by the engine's own method
    assert layer_loads(manifest, {names[1]: 4, names[0]: 16}) == {
        names[0]: LayerLoads((1024, 0), (64, 0)),
        names[1]: LayerLoads((128, 384), (224, 192)),
    }
