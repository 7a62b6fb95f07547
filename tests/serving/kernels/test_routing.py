"""Sorting of pairs of token and slot into tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.serving.kernels import routing
from moe_coverage_plugin.serving.kernels.routing import Routing, max_tiles, route

pytestmark = pytest.mark.slow


def table(widths_E: list[int], device: torch.device) -> torch.Tensor:
    table_E4 = torch.zeros(len(widths_E), 4, dtype=torch.int64)
    table_E4[:, 0] = torch.tensor(widths_E)
    return table_E4.to(device)


def route_reference(topk_ids_TK: torch.Tensor, widths_E: torch.Tensor, block_m: int, min_width: int = 1) -> Routing:
    """Compute ``route`` by a loop over experts; ``sorted_pairs`` ends with the last used tile."""
    ids_M = topk_ids_TK.flatten().long()
    num_pairs, tiles = len(ids_M), []
    for expert, width in enumerate(widths_E.tolist()):
        pairs = (ids_M == expert).nonzero().flatten()
        if width >= min_width:
            tiles += [(expert, part.tolist()) for part in pairs.split(block_m) if len(part)]
    sorted_pairs = [pair for _, part in tiles for pair in part + [num_pairs] * (block_m - len(part))]
    unused = max_tiles(num_pairs, len(widths_E), block_m) - len(tiles)
    experts = [expert for expert, _ in tiles] + [-1] * unused
    return Routing(torch.tensor(sorted_pairs, dtype=torch.int32), torch.tensor(experts, dtype=torch.int32))


def used_tiles(found: Routing) -> int:
    return int((found.expert_of_tile >= 0).sum())


@st.composite
def routings(draw) -> tuple[torch.Tensor, list[int]]:
    """Experts of tokens, including -1, removed experts and numbers that no expert has, and widths."""
    experts = draw(st.integers(1, 40))
    widths = draw(st.lists(st.sampled_from([0, 8, 640]), min_size=experts, max_size=experts))
    tokens, top_k = draw(st.integers(1, 70)), draw(st.integers(1, 8))
    seed, dtype = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([torch.int32, torch.int64]))
    low = draw(st.sampled_from([-1, 0, experts - 1]))  # with the last value, all pairs have one expert
    generator = torch.Generator().manual_seed(seed)
    # numbers that no expert has are left out, like -1
    high = draw(st.sampled_from([experts, experts + 40]))
    return torch.randint(low, high, (tokens, top_k), generator=generator).to(dtype), widths


@pytest.mark.parametrize("limits", [routing.ONE_KERNEL_LIMITS, ()], ids=["one-kernel", "three-kernels"])
def test_equals_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, limits: tuple[tuple[int, int], ...]
) -> None:
    monkeypatch.setattr(routing, "ONE_KERNEL_LIMITS", limits)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(routings(), st.sampled_from([8, 16, 32, 128]), st.sampled_from([0, 1]))
    def check(sample: tuple[torch.Tensor, list[int]], block_m: int, min_width: int) -> None:
        ids_TK, widths_E = sample
        expected = route_reference(ids_TK, torch.tensor(widths_E), block_m, min_width)
        found = route(ids_TK.to(device), table(widths_E, device), block_m, min_width)
        assert used_tiles(found) == used_tiles(expected)
        assert torch.equal(found.expert_of_tile.cpu(), expected.expert_of_tile)
        assert torch.equal(found.sorted_pairs.cpu()[: len(expected.sorted_pairs)], expected.sorted_pairs)

    check()


def test_many_pairs(device: torch.device) -> None:
    ids_TK = torch.randint(-1, 128, (500, 8), dtype=torch.int32)
    expected = route_reference(ids_TK, torch.full((128,), 640), 64)
    found = route(ids_TK.to(device), table([640] * 128, device), 64)
    assert torch.equal(found.expert_of_tile.cpu(), expected.expert_of_tile)
    assert torch.equal(found.sorted_pairs.cpu()[: len(expected.sorted_pairs)], expected.sorted_pairs)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from([1, 16, 64]))
def test_max_tiles_is_the_smallest_upper_bound(counts: list[int], block_m: int) -> None:
    pairs, experts = sum(counts), len(counts)
    bound = max_tiles(pairs, experts, block_m)
    assert sum(-(-count // block_m) for count in counts) <= bound
    # in the worst case, each expert has one pair, and one of them has all others
    first_tiles = min(pairs, experts)
    assert bound == (first_tiles - 1 - (-(pairs - first_tiles + 1) // block_m) if pairs else 0)


def test_reference() -> None:
    ids_TK = torch.tensor([[2, 0], [2, -1], [1, 2]])
    found = route_reference(ids_TK, torch.tensor([8, 0, 8]), 2)
    assert found.sorted_pairs.tolist() == [1, 6, 0, 2, 5, 6]
    assert found.expert_of_tile.tolist() == [0, 2, 2, -1]
    assert used_tiles(found) == 3
