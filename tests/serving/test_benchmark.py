"""The end-to-end benchmark: its checkpoints, its random parameters, and a run in a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving import __main__ as benchmark
from benchmarks.serving import expert_ranks
from benchmarks.serving.__main__ import last_error
from benchmarks.serving.checkpoints import BLOCKS, FULL, SMALL, VARIANTS, random_widths, write_checkpoint
from benchmarks.serving.parameters import NIBBLE_DEVIATION, fill_at_random, fill_packed, parameter_bytes
from benchmarks.serving.ratios import ratios, table
from benchmarks.serving.variant import check_method
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from tests import processes

REPOSITORY = Path(__file__).parents[2]


@given(layers=st.integers(1, 8), experts=st.sampled_from([8, 16, 60, 128]), seed=st.integers(0, 2**31))
def test_widths_keep_three_quarters_in_whole_blocks(layers: int, experts: int, seed: int) -> None:
    widths = random_widths(layers, experts, 768, seed)
    flat = [width for widths_E in widths for width in widths_E]
    assert [len(widths_E) for widths_E in widths] == [experts] * layers
    assert 4 * sum(flat) == 3 * layers * experts * 768
    assert all(width % 128 == 0 and 128 <= width <= 768 for width in flat)
    assert widths == random_widths(layers, experts, 768, seed)


def test_widths_of_the_full_shape_are_unequal() -> None:
    flat = {width for widths_E in random_widths(48, 128, 768, seed=0) for width in widths_E}
    assert flat == {128 * blocks for blocks in range(1, BLOCKS + 1)}


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoint_is_a_configuration_alone(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / name, FULL, VARIANTS[name], seed=0)
    assert [file.name for file in (tmp_path / name).iterdir()] == ["config.json"]
    config = json.loads((tmp_path / name / "config.json").read_text())
    manifest = Manifest.from_checkpoint(tmp_path / name)
    if VARIANTS[name].pruned:
        assert manifest is not None
        assert manifest.layout == "ragged"
        assert len(manifest.widths) == 48
        assert config["moe_intermediate_size"] == manifest.declared_width < FULL["moe_intermediate_size"]
        del config["quantization_config"][CONFIG_KEY]
    else:
        assert manifest is None
        assert config["moe_intermediate_size"] == FULL["moe_intermediate_size"]
    groups = config.get("quantization_config", {}).get("config_groups", {})
    expected = {4: [128], 8: [None], 16: []}[VARIANTS[name].bits]
    assert [group["weights"].get("group_size") for group in groups.values()] == expected


def test_attention_is_quantized_alike(tmp_path: Path) -> None:
    quantization = {}
    for name in ("stock4", "ours4"):
        write_checkpoint(tmp_path / name, SMALL, VARIANTS[name], seed=0)
        config = json.loads((tmp_path / name / "config.json").read_text())
        quantization[name] = config["quantization_config"]
    del quantization["ours4"][CONFIG_KEY]
    assert quantization["stock4"] == quantization["ours4"]


@pytest.mark.parametrize(
    ("ragged", "found"),
    [(True, ["CompressedTensorsWNA16MoEMethod"]), (False, ["RaggedExpertsMethod"]), (True, [])],
)
def test_experts_of_another_method_stop_the_benchmark(ragged: bool, found: list[str]) -> None:
    with pytest.raises(CoverageError, match="install this package into vLLM's environment"):
        check_method(ragged, found)
    check_method(True, ["RaggedExpertsMethod"])


class Layer(torch.nn.Module):
    """Parameters under the names that engines use, filled with NaN and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=64, num_hidden_layers=4)
        floats = {"norm_weight": (64,), "weight": (64, 512), "weight_scale": (64, 16), "embed_tokens": (512, 64)}
        for name, shape in floats.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, torch.nan, dtype=torch.bfloat16)))
        for name, shape, dtype in (
            ("w2_weight", (64, 64), torch.int32),
            ("w13_weight_packed", (64, 64), torch.uint8),
            ("w13_weight", (64, 64), torch.float8_e4m3fn),
            ("weight_shape", (2,), torch.int64),
        ):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.w2_weight_packed = self.w2_weight


def test_random_parameters_are_those_of_a_model() -> None:
    layer = Layer()
    fill_at_random(layer, seed=0)
    for packed in (layer.w2_weight, layer.w13_weight_packed):
        nibbles = torch.stack([packed.data.view(torch.uint8) & 0xF, packed.data.view(torch.uint8) >> 4])
        counts = torch.bincount(nibbles.flatten().int(), minlength=16) / nibbles.numel()
        assert counts[1:].min() > 0.05
        assert counts.argmax() == 8
    assert 0.9 < layer.w13_weight.float().std() / NIBBLE_DEVIATION < 1.1
    assert torch.equal(layer.norm_weight, torch.ones_like(layer.norm_weight))
    assert layer.weight_shape.tolist() == [0, 0]
    scale = layer.weight_scale.float()
    assert 0 < scale.min() <= scale.max() < 0.05
    assert 0.9 < layer.weight.float().std() * 8 < 1.1
    assert 0.9 < layer.embed_tokens.float().std() / 4 < 1.1


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_packed_values_have_no_mean(dtype: torch.dtype) -> None:
    words = torch.empty(40_000, dtype=dtype)
    fill_packed(words, torch.Generator().manual_seed(0))
    packed = words.view(torch.uint8)
    values = torch.cat([packed & 0xF, packed >> 4]).float() - 8
    assert values.unique().tolist() == list(range(-7, 8))
    # four deviations of the mean of so many
    assert values.mean().abs() < 4 * NIBBLE_DEVIATION / len(values) ** 0.5
    assert values.std().item() == pytest.approx(NIBBLE_DEVIATION, rel=0.02)


def test_parameters_of_two_names_are_counted_once() -> None:
    floats = 64 + 64 * 512 + 64 * 16 + 512 * 64
    assert parameter_bytes(Layer()) == 2 * floats + 4 * 64 * 64 + 2 * 64 * 64 + 8 * 2


def figures(weights: int, speed: float, seconds: float) -> dict[str, object]:
    return {
        "loading_bytes": weights,
        "parameter_bytes": 1,
        "decode": [{"batch": 64, "tokens_per_second": speed}],
        "prefill": {"tokens": 2048, "median_seconds": seconds},
    }


def test_ratios_are_ours_over_stock_of_what_ran() -> None:
    variants = {
        "stock4": figures(200, 100.0, 2.0),
        "ours4": figures(150, 125.0, 1.0),
        "stock16": {"error": "OutOfMemoryError: no room"},
    }
    kinds = {"weights bytes": 0.75, "decode tokens/s, batch 64": 1.25, "prefill seconds, 2048 tokens": 0.5}
    assert ratios(variants) == {"ours4 / stock4": kinds}
    lines = table(variants).splitlines()
    assert len(lines) == 5
    assert lines[2].split() == ["decode", "tokens/s,", "batch", "64", "1.250"]
    assert lines[-1] == "stock16: OutOfMemoryError: no room"


def test_ratios_of_ranks_are_those_of_their_busiest_layers() -> None:
    """Two layers of three experts on two ranks, the last expert removed."""
    names = ["layers.0", "layers.1"]
    manifest = Manifest(
        "ragged",
        8,
        {"layers.0": [8, 4, 0], "layers.1": [4, 4, 8]},
        tokens={"layers.0": [1, 2, 0], "layers.1": [1, 1, 2]},
    )
    tokens = {"layers.0": [10, 30, 0], "layers.1": [20, 0, 20]}
    held = [{"layers.0": [8, 0, 0], "layers.1": [0, 4, 8]}, {"layers.0": [0, 4, 0], "layers.1": [4, 0, 0]}]
    counts = [{name: {"widths": rank[name], "tokens": tokens[name]} for name in names} for rank in held]
    assert expert_ranks.by_rank(counts, [100, 50]) == [
        {"bytes of experts": 100, "experts": 3, "routed tokens": 30, "channels times tokens": 240},
        {"bytes of experts": 50, "experts": 2, "routed tokens": 50, "channels times tokens": 200},
    ]
    assert expert_ranks.ratios(counts, manifest) == {
        # busiest ranks: 30 and 20 of 80; 2 and 3 of 7; of experts 0 and 1 together: 40 and 20
        "tokens": {"counted": 50 * 2 / 80, "expected": 5 * 2 / 7, "by_number": 60 * 2 / 80},
        "work": {"counted": 280 * 2 / 440, "expected": 28 * 2 / 40, "by_number": 360 * 2 / 440},
    }
    assert expert_ranks.description(manifest) == "unknown model, 58.3% of the expert channels in blocks of 1"
    counts[1]["layers.1"]["widths"] = [4, 4, 0]
    with pytest.raises(AssertionError, match="not every expert is on one rank"):
        expert_ranks.ratios(counts, manifest)


@pytest.mark.parametrize(
    ("entry", "message"),
    [(None, "has no experts of unequal width"), ({"layers.0": [8, 4]}, "lacks calibration tokens")],
)
def test_checkpoints_without_counts_stop_before_an_engine_starts(
    entry: dict[str, list[int]] | None, message: str, tmp_path: Path
) -> None:
    manifest = None if entry is None else Manifest("ragged", 8, entry)
    quantization = {} if manifest is None else {"quantization_config": {CONFIG_KEY: manifest.to_entry()}}
    (tmp_path / "config.json").write_text(json.dumps(quantization))
    with pytest.raises(CoverageError, match=message):
        expert_ranks.measure(SimpleNamespace(checkpoint=tmp_path))  # pyright: ignore[reportArgumentType]  # stops first


def test_engines_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ranks, "TIMEOUT_S", 0)
    expert_ranks.wait_for_engines("counting")  # one engine alone
    for name, value in {expert_ranks.FOLDER: str(tmp_path), "VLLM_DP_RANK": "0", "VLLM_DP_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CoverageError, match="another engine has not come to 'counting'"):
        expert_ranks.wait_for_engines("counting")
    (tmp_path / "1.counting").touch()
    expert_ranks.wait_for_engines("counting")


def test_an_engine_that_fails_ends_those_that_wait_for_it() -> None:
    def engine(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code])

    assert expert_ranks.all_succeed([engine(""), engine("")])
    waiting = engine("import time; time.sleep(600)")
    assert not expert_ranks.all_succeed([waiting, engine("raise SystemExit(3)")])
    assert waiting.returncode is not None


def test_last_error_of_a_log_is_its_cause() -> None:
    log = (
        "INFO started\n(EngineCore pid=7) ERROR 01-01 [core.py:1] NotImplementedError: No backend.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert last_error(log) == "NotImplementedError: No backend."
    assert last_error("Killed") is None


@pytest.mark.engine
def test_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serving.json"
    options = ["--small", "--enforce-eager", "--variants", "ours4", "stock16", "--output", str(output)]

    def forked(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        done = processes.run(*command[1:], env=env, cwd=REPOSITORY)
        stdout.write(done.stdout + done.stderr)
        return done

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # as its documentation says
    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(run=forked, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(sys, "argv", ["benchmarks.serving", *options])
    benchmark.main()
    record = json.loads(output.read_text())
    ours, stock = record["variants"]["ours4"], record["variants"]["stock16"]
    assert ours["experts_run_by"] == ["RaggedExpertsMethod"] != stock["experts_run_by"]
    for figures in (ours, stock):
        assert figures["startup_seconds"] > 0
        assert figures["prefill"]["median_seconds"] > 0
        assert [row["batch"] for row in figures["decode"]] == [1, 4]
        assert all(row["tokens_per_second"] > 0 for row in figures["decode"])
        assert figures["routing"]["distinct_experts"] > SMALL["num_experts"] / 2
    assert 0 < ours["parameter_bytes"] < stock["parameter_bytes"]
    assert record["ratios"]["ours4 / stock16"]["weights bytes"] < 0.5
    assert record["environment"]["versions"]["vllm"]
    assert "ours4 / stock16" in capsys.readouterr().out
