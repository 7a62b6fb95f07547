"""An engine loads every weight from the checkpoint, or it does not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest, checksum
from tests.serving.engine import checkpoint_path, open_engine

pytestmark = pytest.mark.engine


def copied(directory: Path, name: str, without: str = "nothing") -> Path:
    """A copy of a checkpoint that lacks tensors, in two shards, with an index that does not list them."""
    source = checkpoint_path(name)
    tensors = {key: t for key, t in load_file(source / "model.safetensors").items() if not key.startswith(without)}
    shards = {f"model-{half + 1}-of-2.safetensors": sorted(tensors)[half::2] for half in range(2)}
    for file, names in shards.items():
        save_file({key: tensors[key] for key in names}, directory / file, {"format": "pt"})
    weight_map = {key: file for file, names in shards.items() for key in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text((source / "config.json").read_text())
    return directory


@pytest.mark.parametrize("name", ["ragged_fp32", "ragged_w4a16"])
@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.o_proj", "model.layers.2.input_layernorm"])
def test_parameter_without_a_tensor_stops_the_engine(tmp_path: Path, name: str, missing: str) -> None:
    """Case 21, case 23: by default vLLM leaves parameters of quantized models at random if no tensor is loaded."""
    path = copied(tmp_path, name, missing)
    with pytest.raises(ValueError, match=rf"the checkpoint lacks \d tensors, first {missing}"):
        open_engine(path)
    remove_record(path)
    with pytest.raises(ValueError, match=rf"not initialized from checkpoint: .*{missing}"):
        open_engine(path)


def remove_record(path: Path) -> None:
    """Make a checkpoint one of release 0.1, whose entry does not list its tensors."""
    config = json.loads((path / "config.json").read_text())
    entry = config["quantization_config"][CONFIG_KEY]
    del entry["contents"]
    entry["sha256"] = checksum(entry)
    (path / "config.json").write_text(json.dumps(config))


def test_missing_shard_is_found_before_an_engine_starts(tmp_path: Path) -> None:
    """Case 23: an index names the files that a checkpoint must have."""
    path = copied(tmp_path, "ragged_w4a16")
    manifest = Manifest.from_checkpoint(path)
    assert manifest is not None
    check_checkpoint(path, manifest)
    (path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CoverageError, match=r"lacks model-2-of-2\.safetensors, which is one of 2 files .* copy the"):
        check_checkpoint(path, manifest)
    for damage in ("", "[]", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'):
        (path / "model.safetensors.index.json").write_text(damage)
        with pytest.raises(CoverageError, match=r"index\.json (cannot be read|lists)"):
            check_checkpoint(path, manifest)


def test_complete_checkpoint_in_shards_is_served_and_what_the_engine_saves_is_not(tmp_path: Path) -> None:
    llm = open_engine(copied(tmp_path, "ragged_w4a16"))
    assert sum(llm.apply_model(lambda model: sum(int(torch.isnan(p).sum()) for p in model.parameters()))) == 0
    # weights that an engine saves are already split among ranks and rearranged
    state = tmp_path / "state"
    state.mkdir()
    (state / "config.json").write_text((tmp_path / "config.json").read_text())
    llm.llm_engine.engine_core.save_sharded_state(path=str(state))
    with pytest.raises(ValueError, match=r"routed_experts.*, which an engine has rearranged .* serve the checkpoint"):
        open_engine(state, load_format="sharded_state")
