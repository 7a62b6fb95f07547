"""Checkpoints in a real vLLM engine agree with transformers, and stock vLLM stops at those it would get wrong."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_coverage_plugin.manifest import Manifest
from tests import processes
from tests.serving.agreement import LARGEST_FLOAT32, assert_agrees, stored_bytes_of_experts
from tests.serving.engine import checkpoint_path, expected_logprobs, open_engine, prompt_logprobs

pytestmark = pytest.mark.engine

TOP_K = 2  # of every tiny model
# field case 2.11: adapters of peft on experts, merged and saved
MERGED_ADAPTERS = ["ragged_lora", "ragged_dora_mixtral"]
RAGGED_16BIT = ["ragged_fp32", "ragged_bf16", "ragged_whole_experts", *MERGED_ADAPTERS]
RECIPES_4BIT = [
    "ragged_w4a16",
    "ragged_w4a16_a64",
    "ragged_gptq_a64",
    "ragged_by_channel",
    "ragged_asymmetric",
    "ragged_after_reap",
    "ragged_fisher_p50_w4a16",
]
REMOVED_EXPERTS_4BIT = [
    "ragged_olmoe",
    "ragged_deepseek",
    "ragged_deepseek_v2",
    "ragged_deepseek_v2_groups",
    "ragged_deepseek_v3",
    "ragged_ernie",
    "ragged_minimax",
    "ragged_qwen3_next",
]
RAGGED_8BIT = ["ragged_fp8", "ragged_fp8_exact", "ragged_float8_attention"]
# published checkpoints of Granite hold all experts of a layer in one tensor
FAMILIES_4BIT = [
    *("ragged_shared_w4a16", "ragged_mixtral", "ragged_glm4", *REMOVED_EXPERTS_4BIT),
    "ragged_granite_w4a16",
]
FAMILIES_16BIT = ["ragged_granite"]
RAGGED_4BIT = RECIPES_4BIT + FAMILIES_4BIT
ONE_WIDTH_16BIT = ["padded_fp32", "uniform_fp32"]
ONE_WIDTH_4BIT = ["padded_w4a16"]
SERVED_BY_US = RAGGED_16BIT + RAGGED_4BIT + FAMILIES_16BIT + ONE_WIDTH_4BIT
CHECKPOINTS = SERVED_BY_US + ONE_WIDTH_16BIT


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    """A checkpoint and its engine; one at a time."""
    path = checkpoint_path(request.param)
    with engine_on(path) as llm:
        yield path, llm


@contextmanager
def engine_on(path: Path, **options: Any) -> Iterator[Any]:
    llm = open_engine(path, **options)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


@pytest.mark.parametrize("served", CHECKPOINTS, indirect=True)
def test_agrees_with_transformers(served: tuple[Path, Any]) -> None:
    """Case 13, case 27: the first request to an engine has the log-probabilities of transformers."""
    path, llm = served
    assert_agrees(path, prompt_logprobs(llm, expected_logprobs(path)[0]))


@pytest.mark.parametrize("name", RAGGED_8BIT)
def test_rounds_activations_token_by_token(name: str) -> None:
    """As llm-compressor does; an engine that does not round activations, or mixes tokens, would agree nowhere.

    The last bit of one value may decide to which of two numbers it is rounded, so single windows may differ.
    """
    path = checkpoint_path(name)
    file = load_file(path.with_name(f"{name}.expected.safetensors"))
    expected = file["float32_of_windows"]
    windows = file["prompt_ids"].view(len(expected), -1).tolist()
    with engine_on(path, dtype="float32") as llm:
        found = torch.tensor([prompt_logprobs(llm, window) for window in windows])
        held = sum(llm.apply_model(bytes_of_experts))
    assert (found - expected).abs().amax(-1).median() <= LARGEST_FLOAT32
    assert held == stored_bytes_of_experts(path, "float32")


@pytest.mark.parametrize("name", REMOVED_EXPERTS_4BIT + FAMILIES_16BIT + RAGGED_8BIT)
def test_families_have_removed_experts_and_keep_more_than_top_k(name: str) -> None:
    manifest = Manifest.from_checkpoint(checkpoint_path(name))
    assert manifest is not None
    assert manifest.removed_experts
    assert all(len(widths) - widths.count(0) > TOP_K for widths in manifest.widths.values())


@pytest.mark.parametrize("served", SERVED_BY_US, indirect=True)
def test_experts_take_their_stored_bytes(served: tuple[Path, Any]) -> None:
    path, llm = served
    assert sum(llm.apply_model(bytes_of_experts)) == stored_bytes_of_experts(path)


def bytes_of_experts(model: torch.nn.Module) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if "routed_experts" in name)


def run_apart(
    tmp_path: Path, checkpoints: dict[Path, dict[str, Any]], **environment: str
) -> dict[str, dict[str, Any]]:
    """Results of ``engine.py`` in a process of its own, by checkpoint name."""
    request = tmp_path / "checkpoints.json"
    request.write_text(json.dumps({str(path): options for path, options in checkpoints.items()}))
    done = processes.run(Path(__file__).with_name("engine.py"), request, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"path"')]
    return {Path(result["path"]).name: result for result in results}


def test_stock_vllm_stops_at_ragged_experts_and_loads_one_width(tmp_path: Path) -> None:
    """Field case 2.18: the error names the plugin, of every scheme."""
    ragged = [checkpoint_path(name) for name in [*RAGGED_16BIT, "ragged_w4a16", "ragged_fp8", "ragged_granite_w4a16"]]
    one_width = [checkpoint_path(name) for name in ONE_WIDTH_16BIT]
    results = run_apart(tmp_path, {path: {} for path in ragged + one_width}, VLLM_PLUGINS="")
    for path in ragged:
        assert "prompt_logprobs" not in results[path.name]
        assert "Unknown quantization method: moe-coverage-plugin" in results[path.name]["error"]
    for path in one_width:
        assert_agrees(path, results[path.name]["prompt_logprobs"])
