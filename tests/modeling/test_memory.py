"""Pruning and saving need little memory besides the model, for files of any size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM

from benchmarks.memory import SMALL, Work, measure, write_models
from moe_coverage_plugin import Manifest, recommended_recipe
from moe_coverage_plugin.modeling.memory import free_host_memory, free_memory
from tests import processes
from tests.checkpoint.runs import source, tensors
from tests.tiny import add_tokenizer, token_batches

pytestmark = pytest.mark.slow

# in a process of its own, because a peak only rises; writing 5 to clear_refs resets it on Linux
PROGRAM = """
import ctypes, gc, json, re, sys
from pathlib import Path
import torch
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from tests.tiny import CONFIGS
from transformers import AutoModelForCausalLM
from moe_coverage_plugin.modeling.memory import M_MMAP_THRESHOLD
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.checkpoint.saving import PruningRecord, save_with_manifest
from moe_coverage_plugin.modeling.slicing import prune_layer

LAYERS, EXPERTS, WIDTH = 4, 8, 1024
KEPT = [256, 1024, 0, 256, 1024, 512, 256, 512]

def resident(which):
    return 1024 * int(re.search(rf"{which}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def peak(action):
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident("VmHWM") - before

torch.set_num_threads(1)
# as return_freed_tensors() sets it, which the process of the tests changes
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
shape = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "hidden_size": 512}
model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"](**shape), dtype=torch.float32)
linearize_moe(model)

def prune():
    for layer in find_moe_layers(model):
        prune_layer(layer, [torch.arange(width) for width in KEPT])

found = {"unpruned": sum(parameter.nbytes for parameter in model.parameters()), "pruning": peak(prune)}
found["layer"] = 3 * sum(KEPT) * 512 * 4
found["pruned"] = sum(parameter.nbytes for parameter in model.parameters())
modify_save_pretrained(model)
save_with_manifest(model, PruningRecord("ragged", WIDTH, 256, {}))
found["saving"] = peak(lambda: model.save_pretrained(sys.argv[1], max_shard_size=sys.argv[2]))
print(json.dumps(found))
"""


def test_peak_is_below_one_layer(tmp_path: Path) -> None:
    """Case 19: saving must not double the memory; it takes less than one layer. For one file, see the entire job."""
    done = processes.run("-c", PROGRAM, tmp_path / "out", "15MB")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    stored = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert stored == pytest.approx(found["pruned"], rel=0.001)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert found["pruned"] < found["unpruned"] - 3 * found["layer"], "pruned by more than the limit"
    assert found["pruning"] < found["layer"]
    assert found["saving"] < found["layer"]


# in a process of its own, because the loader patches transformers for all models that are opened later
OFFLOADED = """
import sys
from pathlib import Path
from compressed_tensors.offload import get_device_map, load_offloaded_model
from llmcompressor import oneshot
from llmcompressor.utils.dev import load_context
from tests.modeling.test_memory import OFFLOAD, job
from transformers import AutoModelForCausalLM
source, out = map(Path, sys.argv[1:])
for opening, bits in ((load_offloaded_model, 16), (load_context, 4)):
    output = out / f"offloaded_{bits}"
    with opening():
        model = AutoModelForCausalLM.from_pretrained(source, offload_folder=f"{output}.offload", **OFFLOAD)
    assert {"disk", "cpu"} == {str(offload) for _, offload in get_device_map(model).values()}
    job(model, output, bits)
"""
OFFLOAD = {"device_map": "auto_offload", "max_memory": {"cpu": 1_500_000}}


def job(model: Any, output: Path, bits: int) -> None:
    """Run the recommended recipe."""
    recipe = recommended_recipe(0.4, block_size=32, scheme="W4A16" if bits == 4 else None, gptq=False)
    oneshot(
        model=model,
        dataset=token_batches(samples=4, length=16),
        recipe=recipe,
        output_dir=str(output),
        shuffle_calibration_samples=False,
    )


def test_offloaded_from_shards_is_saved_as_in_memory(tmp_path: Path) -> None:
    """Case 19: opened by the toolkit's loaders, partly on disk, from a checkpoint of many files."""
    unpruned = source(tmp_path / "unpruned", dtype=torch.float64)
    shards = tmp_path / "shards"
    AutoModelForCausalLM.from_pretrained(unpruned).save_pretrained(shards, max_shard_size="500KB")
    add_tokenizer(shards)
    assert len(list(shards.glob("*.safetensors"))) > 3
    for bits in (16, 4):
        job(str(shards), tmp_path / f"memory_{bits}", bits)
    done = processes.run("-c", OFFLOADED, shards, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "offloaded_16").glob("*.safetensors"))) > 1, "a file is gathered before it is written"
    for bits in (16, 4):
        memory, offloaded = tmp_path / f"memory_{bits}", tmp_path / f"offloaded_{bits}"
        assert widths(offloaded) == widths(memory)
        expected, found = tensors(memory), tensors(offloaded)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def widths(checkpoint: Path) -> dict[str, list[int]]:
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    return manifest.widths


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint of six layers of 22 MB in shards, and the bytes of a layer; fits of narrow experts take little."""
    shape = {"hidden_size": 2048, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 6}
    shape = SMALL | shape | {"moe_intermediate_size": 256}
    return write_models(tmp_path_factory.mktemp("random"), shape, gigabytes=0.14, seed=0)


@pytest.mark.parametrize("opening", ["linear", "offloaded"])
def test_peak_of_an_entire_job(
    random_model: tuple[Path, int], tmp_path: Path, opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 19: open, score, fit, prune, pack, save; the small benchmark, with the limit of the benchmark."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint, layer_bytes = random_model
    run = measure(checkpoint, tmp_path, Work(opening, bits=4, tokens=4, seed=0), layer_bytes)
    assert run["stored_bytes"] < run["checkpoint_bytes"] / 3
    assert run["peak_bytes"] <= run["bar_bytes"] == int(1.15 * run["checkpoint_bytes"] + layer_bytes)
    if opening == "offloaded":
        # two layers may stay in memory by the offload's own limit
        assert run["peak_bytes"] < 4 * layer_bytes < run["checkpoint_bytes"]


# --- free memory


def card(monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int, share: float) -> None:
    """A card of 1000 bytes, and what PyTorch has taken of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: allocated)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: share)


@pytest.mark.parametrize(("share", "expected"), [(1.0, 700 + 100), (0.8, 600 + 100), (0.3, 100 + 100), (0.1, 0 + 100)])
def test_the_limit_of_a_process_counts(monkeypatch: pytest.MonkeyPatch, share: float, expected: int) -> None:
    """What PyTorch has reserved and does not use, 100 bytes here, is free in any case."""
    card(monkeypatch, free=700, reserved=200, allocated=100, share=share)
    assert free_memory(torch.device("cuda:0")) == expected


@pytest.mark.parametrize(("limit", "expected"), [("max", 5000), ("3000", 3000 - 1500 + 400), ("1000", 0)])
def test_the_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    """Pages of files, 400 bytes here, are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    monkeypatch.setattr("moe_coverage_plugin.modeling.memory.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1500\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nactive_file 300\ninactive_file 100\n")
    assert free_memory(torch.device("cpu")) == expected


def test_free_memory_without_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    monkeypatch.setattr("moe_coverage_plugin.modeling.memory.CGROUP", tmp_path)
    assert free_host_memory() == 5000
