"""Choice of launch plans."""

import pytest

from moe_coverage_plugin.serving.kernels.tiles import LaunchPlan, choose_plan

QWEN3, MIXTRAL, DEEPSEEK_V3 = (128, 2048, 640), (8, 4096, 11904), (256, 7168, 1664)


def chosen(shape: tuple[int, int, int], pairs: int, bits: int, itemsize: int = 2) -> LaunchPlan:
    experts, hidden, width = shape
    return choose_plan(pairs, experts, hidden, experts * hidden * width, bits, itemsize)


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL, DEEPSEEK_V3])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tile_sizes_are_valid(itemsize: int, bits: int, shape: tuple[int, int, int]) -> None:
    for pairs in [1, 2, 8, 64, 65, 512, 2048, 8192, 65536]:
        plan = chosen(shape, pairs, bits, itemsize)
        assert plan.block_m >= 8
        for tiles in (plan.gate_up, plan.down):
            assert tiles.block_k % 32 == 0
            assert tiles.block_n % 8 == 0
            sizes = plan.block_m, tiles.block_n, tiles.block_k, tiles.num_warps
            assert all(size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_few_pairs_use_the_decode_path(bits: int) -> None:
    assert chosen(QWEN3, 1, bits).path == "decode"
    assert chosen(QWEN3, 65536, bits).path == "tiled"


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_large_experts_use_the_decode_path_for_fewer_pairs(bits: int) -> None:
    few = [pairs for pairs in range(1, 65) if chosen(QWEN3, pairs, bits).path == "decode"]
    fewer = [pairs for pairs in range(1, 65) if chosen(DEEPSEEK_V3, pairs, bits).path == "decode"]
    assert few == list(range(1, 17 if bits == 4 else 33))
    assert fewer == list(range(1, len(fewer) + 1))
    assert 0 < len(fewer) < len(few)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("pairs", [4, 32, 64])
def test_few_large_experts_fill_a_card(pairs: int, bits: int) -> None:
    """With fewer programs, a third of the card's multiprocessors or of their capacity is not used."""
    experts, hidden, _ = MIXTRAL
    assert hidden // chosen(MIXTRAL, pairs, bits).down.block_n * min(pairs, experts) >= 256
