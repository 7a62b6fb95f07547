import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.serving.kernels import routing
from moe_coverage_plugin.serving.kernels.routing import max_tiles, route, route_reference


def table(widths_E: list[int], device: torch.device) -> torch.Tensor:
    table_E4 = torch.zeros(len(widths_E), 4, dtype=torch.int64)
    table_E4[:, 0] = torch.tensor(widths_E)
    return table_E4.to(device)


def used_tiles(found: routing.Routing) -> int:
    return int((found.expert_of_tile >= 0).sum())


@st.composite
def routings(draw) -> tuple[torch.Tensor, list[int]]:
    """Experts of tokens, -1 and removed experts among them, and the widths."""
    experts = draw(st.integers(1, 40))
    widths = draw(st.lists(st.sampled_from([0, 8, 640]), min_size=experts, max_size=experts))
    tokens, top_k = draw(st.integers(1, 70)), draw(st.integers(1, 8))
    seed, dtype = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([torch.int32, torch.int64]))
    low = draw(st.sampled_from([-1, 0, experts - 1]))  # the last one: all pairs to one expert
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, experts, (tokens, top_k), generator=generator).to(dtype), widths


@pytest.mark.parametrize("one_kernel", [routing.ONE_KERNEL, ()], ids=["one-kernel", "three-kernels"])
def test_equals_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, one_kernel: tuple[tuple[int, int], ...]
) -> None:
    monkeypatch.setattr(routing, "ONE_KERNEL", one_kernel)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(routings(), st.sampled_from([16, 32, 128]), st.sampled_from([0, 1]))
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
def test_max_tiles_is_the_least_bound(counts: list[int], block_m: int) -> None:
    pairs, experts = sum(counts), len(counts)
    bound = max_tiles(pairs, experts, block_m)
    assert sum(-(-count // block_m) for count in counts) <= bound
    # the worst case: one pair to each expert, the rest to one of them
    begun = min(pairs, experts)
    assert bound == (begun - 1 - (-(pairs - begun + 1) // block_m) if pairs else 0)


def test_reference_is_what_it_says() -> None:
    ids_TK = torch.tensor([[2, 0], [2, -1], [1, 2]])
    found = route_reference(ids_TK, torch.tensor([8, 0, 8]), 2)
    assert found.sorted_pairs.tolist() == [1, 6, 0, 2, 5, 6]
    assert found.expert_of_tile.tolist() == [0, 2, 2, -1]
    assert used_tiles(found) == 3
