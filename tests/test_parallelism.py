"""Degrees of tensor parallelism, compared with the arithmetic of vLLM."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin import parallelism
from moe_coverage_plugin.parallelism import ParallelShape, SplitLayer, degrees, imbalance, obstacles, rank_ranges

# Qwen3-30B-A3B in W4A16, group 128
QWEN3 = ParallelShape(
    attention_heads=32,
    key_value_heads=4,
    experts=128,
    vocabulary=151936,
    layers=(SplitLayer("attention output", 4096, 128),),
)


def legal(shape: ParallelShape, limit: int = 16) -> list[int]:
    return [degree for degree, found in degrees(shape, limit).items() if not found]


def test_powers_of_two_split_a_ragged_qwen3() -> None:
    assert legal(QWEN3) == [1, 2, 4, 8, 16]


def test_groups_of_experts_of_one_width_are_not_cut() -> None:
    uniform = replace(QWEN3, layers=(SplitLayer("experts", 512, 128),))
    assert legal(uniform) == [1, 2, 4]
    assert obstacles(uniform, 8) == [
        "64 channels of the experts on each rank are not a multiple of the group size 128"
    ]
    assert legal(replace(QWEN3, layers=(SplitLayer("experts", 512),))) == [1, 2, 4, 8, 16]


def test_entire_experts_are_not_cut() -> None:
    uniform = replace(QWEN3, layers=(SplitLayer("experts", 512, 128, of_experts=True), SplitLayer("dense MLP", 1024)))
    assert obstacles(uniform, 8) == [
        "64 channels of the experts on each rank are not a multiple of the group size 128"
    ]
    assert obstacles(uniform, 8, expert_parallel=True) == []
    assert legal(uniform) == [1, 2, 4]
    entire = degrees(uniform, expert_parallel=True)
    assert [degree for degree, found in entire.items() if not found] == [1, 2, 4, 8, 16]


def test_every_obstacle_is_named() -> None:
    shape = ParallelShape(6, 4, 2, 1000, (SplitLayer("dense MLP", 320, 64), SplitLayer("shared expert", 384)))
    assert obstacles(shape, 5) == [
        "6 attention heads are not a multiple of it",
        "4 key/value heads are neither a multiple nor a divisor of it",
        "2 experts are fewer",
        "1024 rows of the padded vocabulary are not a multiple of it",
        "384 channels of the shared expert are not a multiple of it",
    ]
    assert obstacles(shape, 2) == [
        "160 channels of the dense MLP on each rank are not a multiple of the group size 64"
    ]


@pytest.mark.parametrize(("heads", "expected"), [(1, True), (2, True), (3, True), (4, False), (6, True), (24, True)])
def test_key_value_heads_are_split_or_copied(heads: int, expected: bool) -> None:
    shape = ParallelShape(12, heads, 128, 64 * 6, ())
    assert (obstacles(shape, 6) == []) == expected


def test_latent_attention_has_no_key_value_heads() -> None:
    assert obstacles(ParallelShape(12, None, 64, 64 * 6, ()), 6) == []


SIZES = st.integers(1, 200)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.none() | st.integers(1, 8), st.integers(1, 16))
def test_legal_degrees_pass_vllms_assertions(
    heads: int, kv_heads: int, experts: int, vocabulary: int, channels: int, group: int | None, degree: int
) -> None:
    shape = ParallelShape(heads, kv_heads, experts, vocabulary, (SplitLayer("layer", channels, group),))
    copied_or_split = degree % kv_heads == 0 if degree >= kv_heads else kv_heads % degree == 0
    passes = (
        heads % degree == 0
        and copied_or_split
        and degree <= experts
        and ((vocabulary + 63) // 64 * 64) % degree == 0
        and channels % degree == 0
        and (group is None or channels // degree % group == 0)
    )
    assert (obstacles(shape, degree) == []) == passes


def test_needs_the_standard_library_only() -> None:
    program = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, parallelism.__file__], capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & {"torch", "vllm", "transformers", "llmcompressor", "moe_coverage_plugin"}


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.sampled_from([1, 32, 64, 128]), st.integers(1, 9))
def test_rank_ranges_partition_every_expert_and_load_ranks_evenly(
    widths_E: list[int], unit: int, world_size: int
) -> None:
    """Case 1, case 2, case 4: any width is spread over any number of ranks without cutting a quantization group."""
    by_rank = [rank_ranges(widths_E, unit, rank, world_size) for rank in range(world_size)]
    for width, ranges in zip(widths_E, zip(*by_rank, strict=True), strict=True):
        assert ranges[0][0] == 0
        assert ranges[-1][1] == width
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        # no quantization group is cut, and no rank has over one unit more of an expert than another
        assert all(start % unit == 0 or start == width for start, _ in ranges)
        units = [-(-(stop - start) // unit) for start, stop in ranges]
        assert max(units) - min(units) <= 1
    loads = [sum(-(-(stop - start) // unit) for start, stop in ranges) for ranges in by_rank]
    assert max(loads) - min(loads) <= 1


def test_rank_ranges_by_hand() -> None:
    # 5 groups of 128 on 2 ranks are split 3 + 2, and 2 + 3 for the next expert with an odd number of groups; of 4.5
    # groups of 64 the half is last
    assert rank_ranges([640, 256, 640], 128, 0, 2) == [(0, 384), (0, 128), (0, 256)]
    assert rank_ranges([640, 256, 640], 128, 1, 2) == [(384, 640), (128, 256), (256, 640)]
    assert [rank_ranges([64, 288], 64, rank, 2)[1] for rank in range(2)] == [(0, 128), (128, 288)]
    assert [rank_ranges([256, 128], 128, rank, 4)[1] for rank in range(4)] == [(0, 0), (0, 0), (0, 128), (128, 128)]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 5))
def test_imbalance_is_of_the_fullest_rank(units_LE: list[list[int]], world_size: int) -> None:
    layers = [[64 * units for units in units_E] for units_E in units_LE]
    loads = [
        sum(stop - start for widths_E in layers for start, stop in rank_ranges(widths_E, 64, rank, world_size))
        for rank in range(world_size)
    ]
    total = sum(map(sum, layers))
    assert sum(loads) == total
    expected = max(loads) / (total / world_size) - 1 if total else 0
    assert imbalance(layers, 64, world_size) == pytest.approx(expected, abs=1e-12)
