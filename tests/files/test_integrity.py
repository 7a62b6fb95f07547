"""The check of all readers stops with its own error, whatever is in the files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.files.record import expected_tensors, record_contents
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest, checksum
from tests.faults.fuzz_targets import Choices, damaged_bytes, damaged_json
from tests.mutations import WEIGHTS, Tensor, read_file, write_file

HIDDEN, WIDTH, GROUP = 32, 16, 8
MOST_CHARACTERS = 2000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest one that has everything: two layers, packed experts of which one is removed, a norm, a router."""
    directory = tmp_path_factory.mktemp("checkpoint")
    one, tensors = b"\0\0\x80\x3f", {}
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    manifest = Manifest("ragged", 2 * WIDTH, {name: [WIDTH, 0, WIDTH] for name in names}, WIDTH)
    for name in names:
        for expert in (0, 2):
            for projection, rows, columns in (
                ("gate_proj", WIDTH, HIDDEN),
                ("up_proj", WIDTH, HIDDEN),
                ("down_proj", HIDDEN, WIDTH),
            ):
                path, shape = f"{name}.{expert}.{projection}.weight", rows.to_bytes(8, "little")
                tensors[f"{path}_packed"] = Tensor("I32", [rows, columns // 8], bytes(rows * columns // 2))
                scales = rows * columns // GROUP
                tensors[f"{path}_scale"] = Tensor("F32", [rows, columns // GROUP], one * scales)
                tensors[f"{path}_shape"] = Tensor("I64", [2], shape + columns.to_bytes(8, "little"))
        layer = name.removesuffix(".mlp.experts")
        tensors[f"{layer}.mlp.gate.weight"] = Tensor("F32", [3, HIDDEN], one * 3 * HIDDEN)
        tensors[f"{layer}.input_layernorm.weight"] = Tensor("F32", [HIDDEN], one * HIDDEN)
    write_file(directory / WEIGHTS, tensors)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "moe_intermediate_size": WIDTH // 2}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config["quantization_config"] = {"config_groups": groups, "ignore": ["model.layers.0.mlp.gate"]}
    manifest = replace(manifest, contents=record_contents(directory, manifest, config))
    config["quantization_config"][CONFIG_KEY] = manifest.to_entry()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def opens(directory: Path) -> bool:
    """Whether the check accepts a directory; it must raise no other error than its own."""
    try:
        manifest = Manifest.from_checkpoint(directory)
        if manifest is None:
            return False
        check_checkpoint(directory, manifest)
    except CoverageError as error:
        message = str(error)
    else:
        return True
    assert 0 < len(message) < MOST_CHARACTERS
    return False


def test_a_checkpoint_is_accepted_and_its_record_names_every_tensor(checkpoint: Path) -> None:
    assert opens(checkpoint)
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    assert expected_tensors(manifest).keys() == read_file(checkpoint / WEIGHTS).keys()
    # a pattern for all layers and experts
    assert len(manifest.contents["tensors"]) == 3 * 3 + 2


def test_damaged_configs_and_records(checkpoint: Path, tmp_path: Path) -> None:
    """Field case 2.16: values of any type in any place."""
    (tmp_path / WEIGHTS).symlink_to(tmp_path / "weights")
    (tmp_path / "weights").write_bytes((checkpoint / WEIGHTS).read_bytes())
    original = json.loads((checkpoint / "config.json").read_text())
    outcomes: set[bool] = set()

    @settings(max_examples=300, deadline=None, database=None)
    @given(st.binary(min_size=4, max_size=64), st.sampled_from(["config", "record", "entry"]))
    def run(data: bytes, part: str) -> None:
        config, choices = json.loads(json.dumps(original)), Choices(data)
        entry = config["quantization_config"].pop(CONFIG_KEY)
        if part == "config":
            config = damaged_json(config, choices)
        elif part == "record":
            entry["contents"] = damaged_json(entry["contents"], choices)
        else:
            entry = damaged_json(entry, choices)
        if isinstance(entry, dict):
            entry["sha256"] = checksum(entry)
        if isinstance(config, dict) and isinstance(config.get("quantization_config"), dict):
            config["quantization_config"][CONFIG_KEY] = entry
        (tmp_path / "config.json").write_text(json.dumps(config))
        outcomes.add(opens(tmp_path))

    run()
    assert outcomes == {True, False}


def test_damaged_headers(checkpoint: Path, tmp_path: Path) -> None:
    """Field case 2.14: any change of names, dtypes, shapes and places stops the check, or changes nothing."""
    content = (checkpoint / WEIGHTS).read_bytes()
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(0)
    for _ in range(300):
        header = damaged_bytes(content[8:start], Choices(generator.randbytes(48)))
        (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
        if opens(tmp_path):
            found, expected = read_file(tmp_path / WEIGHTS), read_file(checkpoint / WEIGHTS)
            assert {name: tensor.shape for name, tensor in found.items()} == {
                name: tensor.shape for name, tensor in expected.items()
            }
