"""What cannot be served is refused in the process that the user sees, before an engine process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_coverage_plugin.manifest import CONFIG_KEY
from tests.serving.engine import checkpoint_path, open_engine


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint whose ``quantization_config`` a function edits."""

    def copy(name: str, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        source = checkpoint_path(name)
        config = json.loads((source / "config.json").read_text())
        edit(config["quantization_config"])
        for file in source.iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return copy


@pytest.fixture(autouse=True)
def _engine_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a refusal which only the engine's process speaks would not be heard here.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_unknown_schema_version(edited: Callable[..., Path]) -> None:
    path = edited("ragged_fp32", lambda config: config[CONFIG_KEY].update(version=99))
    with pytest.raises(ValueError, match="schema version 99, this release reads 1"):
        open_engine(path)


def test_experts_in_eight_bits(edited: Callable[..., Path]) -> None:
    path = edited("ragged_w4a16", lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=8))
    with pytest.raises(ValueError, match=r"experts has int8 weights, .* quantize the pruned model again"):
        open_engine(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel is set, .* serve without"),
        ({"enable_lora": True}, "enable_lora is set, .* merge the adapter"),
        ({"tensor_parallel_size": 3, "distributed_executor_backend": "mp"}, "3 ranks .* choose a divisor of it"),
    ],
)
def test_engine_options(edited: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(edited("ragged_fp32"), **options)
