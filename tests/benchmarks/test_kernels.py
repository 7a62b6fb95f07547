"""Shapes, inputs, rows and tables of the kernels' benchmark; its times need a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels import render
from benchmarks.kernels.layers import draw, random_tensors
from benchmarks.kernels.rows import Row, append_row
from benchmarks.kernels.shapes import SHAPES, Shape, copies_needed, expert_bytes, mean_bytes, random_widths
from benchmarks.markers import TITLE

TINY = Shape("tiny", hidden=256, channels=768, experts=5, top_k=2)
ROW = Row(
    shape="Qwen3-30B-A3B",
    hidden=2048,
    channels=768,
    experts=128,
    top_k=8,
    bits=4,
    group_size=128,
    tokens=1,
    width=640,
    calls=24,
    copies=12,
    ours_us=12.34,
    stock_us=10.0,
    ratio=1.234,
    stock_times={"Marlin": 10.0},
    stock_error=None,
    difference=0.003,
    weight_bytes=16e6,
    terabytes_per_second=1.3,
    card="a card",
    versions={"torch": "2"},
    command="python -m benchmarks.kernels",
    seed=0,
)


@given(st.integers(1, 128), st.integers(1, 200), st.integers())
def test_widths_are_multiples_of_a_block_with_the_given_mean(blocks: int, experts: int, seed: int):
    shape = Shape("any", 128, 128 * blocks, experts, 1)
    widths = random_widths(shape, seed)
    assert len(widths) == experts
    assert all(width % 128 == 0 and 128 <= width <= shape.channels for width in widths)
    assert sum(widths) == experts * shape.width
    assert abs(shape.width - shape.channels * 5 / 6) <= 64 or shape.width == 128


def test_widths_of_the_models():
    assert {shape.name: shape.width for shape in SHAPES} == {
        "Qwen3-30B-A3B": 640,
        "Qwen1.5-MoE-A2.7B": 1152,
        "DeepSeek-V2-Lite": 1152,
        "Mixtral-8x7B": 11904,
        "Qwen3-235B-A22B": 1280,
        "DeepSeek-V3": 1664,
    }
    widths = random_widths(SHAPES[0], 0)
    assert set(widths) == {512, 640, 768}
    assert widths != sorted(widths)
    assert widths == random_widths(SHAPES[0], 0) != random_widths(SHAPES[0], 1)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_bytes_of_an_expert_are_those_of_its_tensors(bits: int):
    tensors = random_tensors([384], 256, bits, torch.Generator().manual_seed(0))
    assert expert_bytes(384, 256, bits) == sum(tensor.nbytes for tensor in tensors if tensor is not None)


def test_bytes_of_a_call_are_those_of_the_experts_that_get_tokens():
    widths = [128, 256, 384]
    hit = [[0, 2], [1]]
    assert mean_bytes(hit, widths, 64, 16) == (512 + 256) * 3 * 64 * 2 / 2


@given(st.integers(1, 2**34), st.integers(1, 2**28))
def test_copies_exceed_the_cache_four_times_and_no_more_than_needed(touched: int, cache: int):
    copies = copies_needed(touched, cache)
    assert copies * touched >= 4 * cache
    assert (copies - 1) * touched < 4 * cache


def test_inputs_differ_between_calls_and_repeat_with_the_seed():
    def drawn() -> list:
        generator = torch.Generator().manual_seed(3)
        return [draw(TINY, 7, generator) for _ in range(2)]

    (first, second), (again, _) = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.x_TH, second.x_TH)
    assert not torch.equal(first.topk_ids_TK, second.topk_ids_TK)


def test_inputs_have_the_dtypes_that_both_layers_take():
    call = draw(TINY, 7, torch.Generator().manual_seed(0))
    assert (call.x_TH.dtype, call.x_TH.shape) == (torch.bfloat16, (7, 256))
    assert (call.topk_weights_TK.dtype, call.topk_ids_TK.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(call.topk_weights_TK.sum(-1), torch.ones(7))
    assert all(len(set(ids)) == 2 for ids in call.topk_ids_TK.tolist())


def test_results_are_written_between_markers(tmp_path: Path):
    file, page = tmp_path / "rows.jsonl", tmp_path / "RESULTS.md"
    append_row(file, ROW)
    render.write_results([file], page)
    once = page.read_text()
    assert once.startswith(f"{TITLE}\n\n{render.INTRODUCTION.splitlines()[0]}")
    assert once.index(render.BEGIN) < once.index("1.23 (12.3)") < once.index(render.END)
    page.write_text(f"Mine.\n\n{once}\nMine too.\n")
    render.write_results([file], page)
    assert page.read_text() == f"Mine.\n\n{once}\nMine too.\n"


def test_rows_of_other_versions_have_their_own_tables(tmp_path: Path):
    file, page = tmp_path / "rows.jsonl", tmp_path / "RESULTS.md"
    newer = replace(ROW, versions={"torch": "3", "vllm": "0.32.0"}, ratio=0.75)
    for row in (ROW, newer, replace(newer, ratio=0.5)):
        append_row(file, row)
    render.write_results([file], page)
    older, latest = page.read_text().split("### a card, vLLM 0.32.0")
    assert "1.23 (12.3)" in older
    assert "Versions: torch 2." in older
    assert "0.50 (12.3)" in latest
    assert "0.75 (12.3)" not in latest
    assert "Versions: torch 3, vllm 0.32.0." in latest
