import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_coverage_plugin.manifest import REPORT_NAME, CoverageError
from moe_coverage_plugin.report.stored_weights import StoredWeights, read_stored_weights
from moe_coverage_plugin.report.summary import Summary, summarize

EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
DENSE = {f"{EXPERT}.weight": torch.zeros(4, 8, dtype=torch.bfloat16), "lm_head.weight": torch.zeros(4, 4)}
PACKED = {f"{EXPERT}.weight_packed": torch.zeros(4, 1, dtype=torch.int32), f"{EXPERT}.weight_scale": torch.zeros(4, 1)}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}


def checkpoint(
    directory: Path, tensors: dict[str, torch.Tensor], scheme: dict | None = None, report: Any = None
) -> int:
    """Write weights, ``config.json`` and the report of a checkpoint, and return the size of its weights."""
    save_file(tensors, directory / "model.safetensors")
    quantization = (
        {} if scheme is None else {"quantization_config": {"config_groups": {"group_0": {"weights": scheme}}}}
    )
    (directory / "config.json").write_text(json.dumps(quantization))
    if report is not None:
        (directory / REPORT_NAME).write_text(json.dumps(report))
    return (directory / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("tensors", "scheme", "bits", "storage"),
    [
        (DENSE, None, "16 bits", "BF16, not quantized"),
        (DENSE, GROUPS, "16 bits", "BF16, not quantized"),
        (PACKED, GROUPS, "4 bits", "int4, symmetric, groups of 64"),
        (PACKED, FLOAT8, "8 bits", "float8, symmetric, one scale per channel"),
        ({"lm_head.weight": torch.zeros(2)}, None, "", ""),
    ],
    ids=["16 bits", "decompressed", "4 bits", "8 bits", "no experts"],
)
def test_experts_are_described_as_they_are_stored(
    tmp_path: Path, tensors: dict, scheme: dict | None, bits: str, storage: str
) -> None:
    size = checkpoint(tmp_path, tensors, scheme)
    assert read_stored_weights(tmp_path) == StoredWeights(size, None, bits, storage)


@pytest.mark.parametrize(("before", "expected"), [(1000, 1000), ("1000", None), (0, None), (None, None)])
def test_size_before_is_read_from_the_report(tmp_path: Path, before: Any, expected: int | None) -> None:
    checkpoint(tmp_path, DENSE, report={"weight_bytes_before": before})
    assert read_stored_weights(tmp_path).size_before == expected


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="no weights"):
        read_stored_weights(tmp_path)


def test_a_provenance_is_summarized() -> None:
    provenance = {
        "model": "/models/mini-moe",
        "calibration_batches": 8,
        "recipe": [{"AttributionModifier": {}}, {"ChannelPruningModifier": {"layout": "ragged"}}],
    }
    assert summarize(provenance) == Summary("mini-moe", "Attribution, ChannelPruning", 8)
    assert summarize({"model": "Qwen/Qwen3-30B-A3B"}).model == "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize("value", [None, 3.5, True, [], [[]], {}, {"a": 1}])
def test_unexpected_values_in_a_provenance_are_ignored(value: Any) -> None:
    assert summarize({"model": value, "calibration_batches": value, "recipe": value}) == Summary()
