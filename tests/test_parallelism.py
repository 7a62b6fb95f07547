"""Degrees of tensor parallelism against vLLM's own arithmetic, written out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin import parallelism
from moe_coverage_plugin.parallelism import ParallelShape, SplitLayer, degrees, obstacles

# Qwen3-30B-A3B in W4A16, group 128
QWEN3 = ParallelShape(
    attention_heads=32,
    key_value_heads=4,
    experts=128,
    vocabulary=151936,
    layers=(SplitLayer("attention output", 4096, 128), SplitLayer("experts, as they were before pruning", 768)),
)


def legal(shape: ParallelShape, limit: int = 16) -> list[int]:
    return [degree for degree, found in degrees(shape, limit).items() if not found]


def test_powers_of_two_split_a_ragged_qwen3() -> None:
    assert legal(QWEN3) == [1, 2, 4, 8, 16]


def test_groups_of_experts_of_one_width_stay_whole() -> None:
    uniform = replace(QWEN3, layers=(SplitLayer("experts", 512, 128),))
    assert legal(uniform) == [1, 2, 4]
    assert obstacles(uniform, 8) == ["64 channels of the experts on each rank are no multiple of the group size 128"]
    assert legal(replace(QWEN3, layers=(SplitLayer("experts", 512),))) == [1, 2, 4, 8, 16]


def test_every_obstacle_is_named() -> None:
    shape = ParallelShape(6, 4, 2, 1000, (SplitLayer("dense MLP", 320, 64), SplitLayer("shared expert", 384)))
    assert obstacles(shape, 5) == [
        "6 attention heads are no multiple of it",
        "4 key/value heads are neither a multiple nor a divisor of it",
        "2 experts are fewer",
        "1024 rows of the padded vocabulary are no multiple of it",
        "384 channels of the shared expert are no multiple of it",
    ]
    assert obstacles(shape, 2) == ["160 channels of the dense MLP on each rank are no multiple of the group size 64"]


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
