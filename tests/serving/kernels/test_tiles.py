import pytest

from moe_coverage_plugin.serving.kernels.tiles import choose


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_plan_is_possible(itemsize: int, bits: int) -> None:
    for pairs in [1, 8, 64, 65, 512, 2048, 8192, 65536]:
        plan = choose(pairs, 128, bits, itemsize)
        assert plan.block_m >= 16
        for tiles in (plan.gate_up, plan.down):
            assert tiles.block_k % 32 == 0
            assert tiles.block_n % 8 == 0
            sizes = plan.block_m, tiles.block_n, tiles.block_k, tiles.warps
            assert all(size & (size - 1) == 0 for size in sizes)


def test_few_pairs_need_no_tiles() -> None:
    assert choose(1, 128, 4).path == "decode"
    assert choose(65536, 128, 4).path == "tiled"
