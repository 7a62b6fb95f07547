"""The NF4 benchmark: bytes and padding of experts, and the record of a complete run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import nf4
from benchmarks.allocation.bench import Bench
from benchmarks.allocation.text import Windows
from benchmarks.nf4 import PRUNINGS, Variant, held_expert_bytes, padding, section, stored_expert_bytes
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers

pytestmark = pytest.mark.slow

HIDDEN = 128


@pytest.fixture(autouse=True)
def _eager():
    """Prevent compilation: on a CPU, bitsandbytes compiles for every odd width, which takes seconds each time."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def checkpoints(bench: Bench, calibration: Windows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quarter of the channels removed by the paper's recipe: exact widths, and blocks of 64 in 16 and 4 bits."""
    directory = tmp_path_factory.mktemp("nf4")
    for variant in (Variant("paper", "exact", "NF4"), Variant("paper", "64", "NF4"), Variant("paper", "64", "W4A16")):
        recipe = PRUNINGS[variant.method, variant.widths](0.25)
        setting = nf4.Setting("nf4", variant.checkpoint, variant.method, 0.25, recipe, variant.bits)
        bench.compress(setting, calibration).save_pretrained(directory / variant.checkpoint)
    return directory


def opened(checkpoints: Path, widths: str, weights: str):
    return Variant("paper", widths, weights).open(checkpoints, torch.bfloat16, torch.device("cpu"))


def numbers(model) -> int:
    linears = (linear for layer in find_moe_layers(model) for linear in expert_linears(layer))
    return sum(linear.in_features * linear.out_features for linear in linears)


def test_bytes_of_experts(checkpoints):
    """Bytes in files and in memory: of 16 bit, of NF4 with scales and tables, and of W4A16."""
    plain, packed = opened(checkpoints, "64", "16 bit"), opened(checkpoints, "64", "NF4")
    count, linears = numbers(plain), sum(len(expert_linears(layer)) for layer in find_moe_layers(plain))
    assert stored_expert_bytes(checkpoints / "paper-64-16") == held_expert_bytes(plain) == 2 * count
    table_bytes = 16 * 4
    assert held_expert_bytes(packed) == count * (0.5 + 4 / 64) + linears * table_bytes
    shape_bytes = 2 * 8
    assert stored_expert_bytes(checkpoints / "paper-64-4") == count * (0.5 + 2 / 64) + linears * shape_bytes
    assert held_expert_bytes(opened(checkpoints, "64", "W4A16")) == 2 * count
    nested = held_expert_bytes(opened(checkpoints, "64", "NF4, scales in 8 bit"))
    assert count * (0.5 + 1 / 64) < nested < held_expert_bytes(packed)


def test_padding(checkpoints):
    aligned, exact = (padding(opened(checkpoints, widths, "NF4")) for widths in ("64", "exact"))
    assert (aligned["held"], aligned["by_rows"], aligned["by_channels"], aligned["aligned"]) == (0, 0, 0, 1)
    model = opened(checkpoints, "exact", "NF4")
    widths = [width for layer in find_moe_layers(model) for width in layer.widths if width]
    missing = sum(-width % 64 for width in widths)
    assert missing > 0
    assert exact["held"] == 0
    assert exact["by_rows"] == missing * HIDDEN * (0.5 + 4 / 64)
    assert exact["by_channels"] == 3 * exact["by_rows"]
    assert exact["bytes"] == numbers(model) * (0.5 + 4 / 64)
    assert exact["aligned"] == sum(width % 64 == 0 for width in widths) / len(widths)


def test_complete_run(model_path, tmp_path, monkeypatch, capsys):
    chosen = [
        Variant("unpruned", "all", "16 bit"),
        Variant("unpruned", "all", "NF4"),
        Variant("recommended", "exact", "NF4"),
        Variant("recommended", "64", "W4A16"),
    ]
    monkeypatch.setattr(nf4, "variants", lambda: chosen)
    command = ["nf4", "--model", f"tiny={model_path}", "--calibration", f"web={model_path / 'calibration.txt'}"]
    command += ["--evaluation", f"held={model_path / 'heldout.txt'}", "--calibration-windows", "2", "--windows", "1"]
    command += ["--rounds", "1", "--new-tokens", "2", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "nf4.json")])
    nf4.main()
    (record,) = json.loads((tmp_path / "nf4.json").read_text())
    unpruned, rounded, pruned, packed = record["rows"]
    assert unpruned["losses"]["held"] != rounded["losses"]["held"]
    assert rounded["channels"] == unpruned["channels"] > pruned["channels"] >= packed["channels"]
    assert rounded["held_expert_bytes"] < unpruned["held_expert_bytes"] == unpruned["stored_expert_bytes"]
    assert packed["stored_expert_bytes"] < packed["held_expert_bytes"]
    assert unpruned["tokens_per_second"]["forward_ratio"] == unpruned["tokens_per_second"]["decode_ratio"] == 1
    assert all(speed > 0 for row in record["rows"] for speed in row["tokens_per_second"].values())
    text = section(record)
    assert text in capsys.readouterr().out
    assert "### tiny, 25% of the expert channels removed" in text
    assert sum(line.startswith("| unpruned, all ") for line in text.splitlines()) == 3
