"""Removal of the least used experts, and routers with another top-k."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.allocation.bench import Bench
from benchmarks.allocation.experts import remove_least_used, removed, set_top_k
from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.tiny import VOCAB

TOKENS_LE = torch.tensor([[9, 3, 8, 7, 6, 5, 4, 3], [90, 80, 70, 60, 50, 1, 2, 40]])
IDS = torch.randint(2, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))


def kept(model) -> list[list[int]]:
    return [[e for e, width in enumerate(layer.widths) if width] for layer in find_moe_layers(model)]


def test_least_used_experts_of_each_layer_are_removed(bench: Bench):
    model = copy.deepcopy(bench.pristine)
    remove_least_used(model, TOKENS_LE, 0.3, "layer")  # 2.4 of 8 experts are rounded down to 2
    assert kept(model) == [[0, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 7]]
    assert removed(model, bench.pristine) == (0.25, 4)


def test_least_used_experts_of_the_model_are_removed_in_any_layer(bench: Bench):
    model = copy.deepcopy(bench.pristine)
    remove_least_used(model, TOKENS_LE, 0.25, "model")
    assert kept(model) == [[0, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 7]]
    model = copy.deepcopy(bench.pristine)
    remove_least_used(model, TOKENS_LE, 0.5, "model")
    assert kept(model) == [[0, 2], [0, 1, 2, 3, 4, 7]]


def test_removed_experts_are_never_picked(bench: Bench):
    model = copy.deepcopy(bench.pristine)
    remove_least_used(model, TOKENS_LE, 0.5, "layer")
    picked = picked_experts(model)
    assert all(set(ids.flatten().tolist()) <= set(kept_ids) for ids, kept_ids in zip(picked, kept(model), strict=True))


def test_a_layer_with_too_few_experts_is_an_error(bench: Bench):
    model = copy.deepcopy(bench.pristine)
    with pytest.raises(CoverageError, match="keep 1 experts but its router picks 2"):
        remove_least_used(model, TOKENS_LE, 0.6, "model")
    assert removed(model, bench.pristine) == (0, 0)


def test_routers_pick_another_number_of_experts(bench: Bench):
    model = copy.deepcopy(bench.pristine)
    set_top_k(model, lambda k: k + 1)
    assert [experts.shape[-1] for experts in picked_experts(model)] == [3, 3]
    with pytest.raises(CoverageError, match="has 8 experts and 12 are to be picked"):
        set_top_k(model, lambda k: 4 * k)


def picked_experts(model) -> list[torch.Tensor]:
    """Experts ``[T, K]`` that the router of each layer picks."""
    picked: list[torch.Tensor] = []
    for layer in find_moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda _module, args: picked.append(args[1]))
    with torch.no_grad():
        model(IDS)
    return picked
