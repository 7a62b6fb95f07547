from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.alignment import align_widths
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import RemainderRule

RULES = get_args(RemainderRule)
I = 12  # noqa: E741 - the axis letter of expert channels

layers_of_widths = st.integers(1, 6).flatmap(
    lambda experts: st.lists(st.lists(st.integers(0, I), min_size=experts, max_size=experts), min_size=1, max_size=4)
)


def random_scores(widths_LE: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.rand(*widths_LE.shape, I, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    # Blocks of 4, minimum width 4.
    # Layer 0: the sum of 11 10 5 3 is 29. The expert of width 3 is removed. The floors 8 8 4 sum to 20, and the 9 free
    # channels are two blocks for the experts with remainders 3 and 2. The result is 28, so 1 is not used.
    # Layer 1: the sum of 12 7 6 6 is 31. The floors are 12 4 4 4, and the 7 free channels are one block for the expert
    # with remainder 3. The result is 28, so 3 are not used.
    widths_LE = torch.tensor([[11, 10, 5, 3], [12, 7, 6, 6]])
    aligned = align_widths(widths_LE, torch.ones(2, 4, I), block_size=4, min_width=4, rule="l-r-c")
    assert aligned.widths_LE.tolist() == [[12, 12, 4, 0], [12, 8, 4, 4]]
    assert aligned.unspent == 4
    assert aligned.removed == [(0, 3)]


def test_remainder_by_score_can_differ_from_remainder_by_channels() -> None:
    # The floors of widths 7 and 5 are 4 and 4, so there is one block to assign. By channels, the remainders are 3 and
    # 1. By score, they are 3 (channels 5 to 7 of expert 0, 1 each) and 9 (channel 5 of expert 1).
    scores_LEI = torch.ones(1, 2, I)
    scores_LEI[0, 1] = 9
    widths_LE = torch.tensor([[7, 5]])
    assert align_widths(widths_LE, scores_LEI, 4, 4, "l-r-c").widths_LE.tolist() == [[8, 4]]
    assert align_widths(widths_LE, scores_LEI, 4, 4, "l-r-s").widths_LE.tolist() == [[4, 8]]


def test_removed_score_is_that_of_the_ranks_between_floor_and_width() -> None:
    # Both experts have width 6 and floor 4. Ranks 5 and 6 of expert 0 (9 8 7 6 5 4) have score 9, those of expert 1
    # (20 20 20 20 3 3) have score 6.
    scores_LEI = torch.zeros(1, 2, I)
    scores_LEI[0, 0, :6] = torch.tensor([4.0, 9.0, 8.0, 5.0, 7.0, 6.0])
    scores_LEI[0, 1, :6] = torch.tensor([3.0, 20.0, 20.0, 3.0, 20.0, 20.0])
    assert align_widths(torch.tensor([[6, 6]]), scores_LEI, 4, 4, "l-r-s").widths_LE.tolist() == [[8, 4]]


@pytest.mark.parametrize("rule", RULES)
@given(
    widths=layers_of_widths,
    block_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    blocks=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_hamilton(rule: RemainderRule, widths: list[list[int]], block_size: int, blocks: int, seed: int) -> None:
    widths_LE = torch.tensor(widths)
    min_width = blocks * block_size
    scores_LEI = random_scores(widths_LE, seed)
    aligned = align_widths(widths_LE, scores_LEI, block_size, min_width, rule)

    unspent = 0
    for layer, before_E in enumerate(widths):
        after_E = aligned.widths_LE[layer].tolist()
        remainders: dict[bool, list[float]] = {True: [], False: []}
        for expert, (before, after) in enumerate(zip(before_E, after_E, strict=True)):
            floor = before - before % block_size
            assert after % block_size == 0
            assert after <= I
            if before < max(min_width, 1):
                assert after == 0
                continue
            assert after in (floor, floor + block_size)
            assert after >= min_width
            if floor + block_size <= I:
                ranked = sorted(scores_LEI[layer, expert].tolist(), reverse=True)
                remainder = before - floor if rule == "l-r-c" else sum(ranked[floor:before])
                remainders[after > floor].append(remainder)
        # experts that get a block have the largest remainders; a block is unused only if no expert can take it
        if remainders[True] and remainders[False]:
            assert min(remainders[True]) >= max(remainders[False]) - 1e-12
        left = sum(before_E) - sum(after_E)
        assert 0 <= left < block_size or not remainders[False]
        unspent += left
    assert aligned.unspent == unspent
    expected = [
        (layer, expert)
        for layer, before_E in enumerate(widths)
        for expert, before in enumerate(before_E)
        if before > 0 and aligned.widths_LE[layer, expert] == 0
    ]
    assert aligned.removed == expected


@given(widths=layers_of_widths)
def test_without_removed_experts_less_than_a_block_is_unused(widths: list[list[int]]) -> None:
    widths_LE = torch.tensor(widths)
    aligned = align_widths(widths_LE, random_scores(widths_LE, 0), block_size=4, min_width=0, rule="l-r-c")
    assert torch.equal(aligned.widths_LE.sum(-1), widths_LE.sum(-1) // 4 * 4)
    assert aligned.unspent == int((widths_LE.sum(-1) % 4).sum())


def test_blocks_of_one_channel_only_remove_narrow_experts() -> None:
    widths_LE = torch.tensor([[12, 5, 1, 0]])
    scores_LEI = torch.ones(1, 4, I)
    assert align_widths(widths_LE, scores_LEI, 1, 0, "l-r-c").widths_LE.tolist() == [[12, 5, 1, 0]]
    # all remainders are zero, so the freed channel is assigned to the first expert with less than all channels
    aligned = align_widths(widths_LE, scores_LEI, 1, 4, "l-r-c")
    assert aligned.widths_LE.tolist() == [[12, 6, 0, 0]]
    assert aligned.removed == [(0, 2)]
    assert aligned.unspent == 0


def test_aligned_widths_are_unchanged() -> None:
    widths_LE = torch.tensor([[12, 8, 4, 0], [4, 4, 4, 4]])
    aligned = align_widths(widths_LE, torch.ones(2, 4, I), 4, 4, "l-r-c")
    assert torch.equal(aligned.widths_LE, widths_LE)
    assert aligned.unspent == 0
    assert aligned.removed == []


def test_expert_rounded_to_zero_is_reported_as_removed() -> None:
    # widths 3 3 3 in blocks of 4 without minimum: the 9 channels are two blocks, so expert 2 gets none
    aligned = align_widths(torch.tensor([[3, 3, 3]]), torch.ones(1, 3, I), 4, 0, "l-r-c")
    assert aligned.widths_LE.tolist() == [[4, 4, 0]]
    assert aligned.removed == [(0, 2)]
    assert aligned.unspent == 1


def test_channels_that_no_expert_can_take_are_unused() -> None:
    # both experts of width 3 are removed, and the only kept expert already has all of its channels
    aligned = align_widths(torch.tensor([[12, 3, 3]]), torch.ones(1, 3, I), 4, 4, "l-r-c")
    assert aligned.widths_LE.tolist() == [[12, 0, 0]]
    assert aligned.unspent == 6
    assert aligned.removed == [(0, 1), (0, 2)]


@pytest.mark.parametrize("block_size", [5, 0, -4, 24])
def test_block_size_that_does_not_divide_is_an_error(block_size: int) -> None:
    with pytest.raises(CoverageError, match="choose one of 1, 2, 3, 4, 6, 12"):
        align_widths(torch.tensor([[6]]), torch.ones(1, 1, I), block_size, 0, "l-r-c")


@pytest.mark.parametrize("min_width", [5, -1])
def test_minimum_width_that_is_not_a_multiple_of_the_block_is_an_error(min_width: int) -> None:
    with pytest.raises(CoverageError, match=f"minimum width {min_width} "):
        align_widths(torch.tensor([[6]]), torch.ones(1, 1, I), 4, min_width, "l-r-c")


def test_nan_scores_are_an_error_that_names_the_expert() -> None:
    scores_LEI = torch.ones(1, 2, I)
    scores_LEI[0, 1, 0] = float("nan")
    with pytest.raises(CoverageError, match="layer 0 expert 1"):
        align_widths(torch.tensor([[6, 6]]), scores_LEI, 4, 4, "l-r-s")
