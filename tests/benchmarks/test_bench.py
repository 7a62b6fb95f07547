"""Bytes and losses of compressed models in memory are those of their saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import moe_coverage_plugin
from benchmarks.allocation.bench import Bench, deviation, mean_loss, open_linear
from benchmarks.allocation.recipes import Recipe, channels
from benchmarks.allocation.sizes import checkpoint_bytes, ideal_sparse_bytes
from benchmarks.allocation.tables import METHODS, Setting
from benchmarks.allocation.text import Windows
from moe_coverage_plugin import Manifest
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.options import NLL_IMPORTANCES

pytestmark = pytest.mark.slow


def setting(method: str, sparsity: float, bits: int) -> Setting:
    recipe = METHODS[method](sparsity) if method in METHODS else Recipe()
    return Setting("test", method, method, sparsity, recipe, bits)


def payload(checkpoint: Path) -> int:
    """Bytes of all tensors of a checkpoint, without headers."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 - not a mapping
    return total


@pytest.mark.parametrize(
    ("method", "sparsity", "bits"),
    [("unpruned", 0.0, 4), ("recommended", 0.5, 16), ("recommended", 0.5, 4), ("REAP", 0.25, 8)],
)
def test_counted_bytes_are_those_of_the_saved_checkpoint(
    bench: Bench, calibration: Windows, tmp_path: Path, method: str, sparsity: float, bits: int
):
    model = bench.compress(setting(method, sparsity, bits), calibration)
    counted = checkpoint_bytes(model)
    model.save_pretrained(tmp_path)
    assert counted == payload(tmp_path)


def test_ideal_sparse_bytes_count_nonzero_weights_and_a_mask(bench: Bench, calibration: Windows):
    model = bench.compress(setting("Wanda", 0.5, 16), calibration)
    experts = 2 * 8 * 3 * 128 * 192
    dense = checkpoint_bytes(model)
    assert dense == checkpoint_bytes(bench.pristine)
    assert ideal_sparse_bytes(model) == dense - experts // 2 * 2 + experts // 8


@pytest.mark.parametrize(("method", "bits"), [("recommended", 4), ("REAP", 8)])
def test_loss_in_memory_is_the_loss_of_the_saved_checkpoint(
    model_path: Path, bench: Bench, calibration: Windows, tmp_path: Path, method: str, bits: int
):
    exact = Bench(
        open_linear(model_path, torch.float32, bench.device),
        bench.tokenizer,
        bench.evaluation,
        bench.device,
        tmp_path / "scores",
    )
    exact.folder.mkdir()
    model = exact.compress(setting(method, 0.25, bits), calibration)
    ids = bench.evaluation["random"].ids_WS
    in_memory = mean_loss(model, ids)
    model.save_pretrained(tmp_path / "saved")
    assert abs(in_memory - mean_loss(opened(tmp_path / "saved"), ids)) < 1e-4


def test_deviation_from_the_unpruned_model(bench: Bench, calibration: Windows):
    ids = bench.evaluation["random"].ids_WS
    assert deviation(bench.pristine, bench.pristine, ids).divergence == 0
    pruned = bench.compress(setting("uniform width", 0.5, 16), calibration)
    found = deviation(pruned, bench.pristine, ids)
    assert found.loss == pytest.approx(mean_loss(pruned, ids), rel=1e-5)
    with torch.no_grad():
        ours, expected = (model(input_ids=ids).logits[:, :-1].double() for model in (pruned, bench.pristine))
    probs = expected.softmax(-1)
    entropies = [-(probs * logits.log_softmax(-1)).sum(-1).mean() for logits in (ours, expected)]
    assert found.divergence == pytest.approx(float(entropies[0] - entropies[1]), rel=1e-3)


def opened(path: Path) -> Any:
    if Manifest.from_checkpoint(path) is not None:
        return moe_coverage_plugin.load(path, dtype=torch.float32)
    quantization = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=quantization)


def test_one_score_file_serves_all_importances_of_a_kind(bench: Bench, calibration: Windows):
    recipes = [METHODS[name](0.25) for name in ("paper inside layers", "inside layers, exact ALA", "uniform width")]
    files = {bench.score_file(Setting("test", "", "", 0.25, recipe), calibration) for recipe in recipes}
    assert len(files) == 1
    by_gradient = [channels(0.25, {"intra_layer": "coverage"}, importance=name) for name in NLL_IMPORTANCES]
    nll = {bench.score_file(Setting("test", "", "", 0.25, recipe), calibration) for recipe in by_gradient}
    assert len(nll) == 1
    assert not nll & files
    noisy = bench.score_file(Setting("test", "", "", 0.25, METHODS["paper"](0.25)), calibration)
    assert noisy is not None
    assert noisy not in files | nll
    assert load_scores(noisy)[0].layer_loss_L is not None


def test_scores_of_another_process_are_taken(bench: Bench, calibration: Windows):
    fields = setting("recommended", 0.25, 16)
    measured = bench.score_file(fields, calibration)
    assert measured is not None
    written = measured.stat().st_mtime_ns
    other = Bench(bench.pristine, bench.tokenizer, bench.evaluation, bench.device, bench.folder)
    assert other.score_file(fields, calibration) == measured
    assert measured.stat().st_mtime_ns == written


def test_gptq_alone_calibrates(bench: Bench, calibration: Windows):
    """Rounding by GPTQ depends on the text, also where nothing is pruned."""
    row = Setting("test", "", "", 0.0, Recipe(), bits=4, rounding="gptq")
    assert row.calibrated
    assert bench.measure(row, calibration, 0).loss != bench.measure(setting("unpruned", 0.0, 4), calibration, 0).loss


def test_pristine_model_is_not_changed(bench: Bench, calibration: Windows):
    before = {name: tensor.clone() for name, tensor in bench.pristine.state_dict().items()}
    for method in ("recommended", "REAP"):
        bench.measure(setting(method, 0.25, 4), calibration, seed=0)
    after = bench.pristine.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(module._forward_hooks for module in bench.pristine.modules())
