"""4-bit checkpoints of every family that has them: routers are not in 4 bits, and experts have one scheme."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload.cache.cpu import CPUCache
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageModifier,
    Manifest,
    load,
)
from moe_coverage_plugin.manifest import REPORT_NAME
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, projections
from tests import paper_method
from tests.checkpoint.runs import BLOCK, SPARSITY, W4, config_json, logits, prune, source, tensors
from tests.tiny import token_batches

pytestmark = pytest.mark.slow

# families whose checkpoints store experts one by one
FAMILIES = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "qwen3_next",
)
DATA: dict[str, Any] = {"dataset": token_batches(samples=4, length=16), "shuffle_calibration_samples": False}


def made(directory: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any):
    """A pruned checkpoint, and the model that was saved."""
    model = source(directory / "in", family, dtype)
    output = directory / "out"
    return output, prune(model, output, sparsity=SPARSITY.get(family, 0.4), **options)


@pytest.fixture(scope="module", params=FAMILIES)
def written(request, tmp_path_factory):
    output, model = made(tmp_path_factory.mktemp(request.param), request.param, quantize=True)
    return output, logits(model)


def test_load_equals_the_model_in_memory(written):
    """Case 13, case 15: scales in wrong groups, or a router in 4 bits, are visible in the logits only."""
    output, expected = written
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(logits(load(output)), expected, rtol=1e-4, atol=1e-4)


def test_dtype_changes_as_if_there_were_an_accelerator(written, monkeypatch):
    """With an accelerator, the toolkit's caches return copies, so that a change of dtype would be lost silently."""
    output, expected = written
    monkeypatch.setattr(CPUCache, "onload", lambda _, tensor: None if tensor is None else tensor.clone())
    model = load(output, torch.bfloat16)
    held = {parameter.dtype for parameter in model.parameters()}
    assert torch.bfloat16 in held
    assert held <= {torch.bfloat16, torch.float32}  # some families keep tensors in float32
    assert {p.dtype for p in model.to(torch.float64).parameters()} == {torch.float64}
    assert logits(model.to(torch.float32)).dtype == torch.float32
    assert not torch.equal(logits(model), expected)


def test_nothing_that_routes_is_in_four_bits(written):
    """Case 9, case 15: routers and gates of shared experts are not quantized, and the config lists them.

    Engines build a layer as the config describes it, so every matrix that is not packed must be in its ignore list.
    """
    output, _ = written
    found = tensors(output)
    packed = {name.rpartition(".")[0] for name in found if name.endswith(".weight_packed")}
    plain = {name.removesuffix(".weight") for name, t in found.items() if name.endswith(".weight") and t.ndim == 2}
    routing = {name for name in plain | packed if re.search(r"(gate|router)$", name)}
    assert len(routing) >= len(Manifest.from_checkpoint(output).widths)
    assert not routing & packed
    assert set(config_json(output)["quantization_config"]["ignore"]) >= plain - {"model.embed_tokens"}


def test_experts_of_a_layer_are_stored_alike(written):
    """Case 10, case 12: every expert of a layer has one scheme, under the target that vLLM looks for."""
    output, _ = written
    kinds: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    by_projection: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in tensors(output):
        if (match := re.match(r"(.*\.experts)\.(\d+\.\w+)\.(\w+)$", name)) is not None:
            by_projection[match[1], match[2]].append(match[3])
    for (layer, _), stored in by_projection.items():
        kinds[layer].add(tuple(sorted(stored)))
    assert len(kinds) == len(Manifest.from_checkpoint(output).widths)
    assert all(each == {("weight_packed", "weight_scale", "weight_shape")} for each in kinds.values())
    groups = config_json(output)["quantization_config"]["config_groups"].values()
    assert [group["targets"] for group in groups] == [["Linear"]]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "ernie4_5_moe"])
def test_tensors_that_a_family_keeps_in_float32(tmp_path, family, quantize):
    """Case 14: correction biases, and routers that compute in float32, are never rounded to bfloat16.

    Nor are the frequencies of rotary embeddings, which are in no file.
    """
    output, model = made(tmp_path, family, torch.bfloat16, quantize=quantize)
    kept = {name for name, t in model.state_dict().items() if t.dtype == torch.float32 and "scale" not in name}
    assert any(name.endswith("e_score_correction_bias") for name in kept)
    stored = {name for name, tensor in tensors(output).items() if tensor.dtype == torch.float32}
    assert len(stored) == len(kept)
    for dtype in (None, torch.bfloat16):
        loaded = load(output, dtype=dtype)
        assert {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32} == kept
        frequencies = [t for name, t in loaded.named_buffers() if name.endswith("inv_freq")]
        assert frequencies
        assert all(tensor.dtype == torch.float32 for tensor in frequencies)
        assert torch.equal(logits(loaded), logits(model))


def test_biases_of_routers_keep_their_dtype(tmp_path):
    """Case 14: the bias of a router itself is loaded unchanged."""
    output, model = made(tmp_path, "gpt_oss", torch.bfloat16)
    loaded = load(output)
    for before, after in zip(find_moe_layers(model), find_moe_layers(loaded), strict=True):
        assert after.router.bias.dtype == before.router.bias.dtype
        assert torch.equal(after.router.bias, before.router.bias)


def test_padding_is_zero_in_each_half(tmp_path):
    """Case 7: gate and up are padded separately, and the padding decompresses to exact zeros at finite scales."""
    output, _ = made(tmp_path, "qwen3_moe", layout="padded", quantize=True)
    report = json.loads((output / REPORT_NAME).read_text())["layers"]
    padded = 0
    for layer in find_moe_layers(load(output)):
        for width, mlp in zip(report[layer.name]["widths"], layer.mlps, strict=True):
            linears = {name: linear.weight for name, linear in projections(mlp).items()}
            assert not linears["gate_proj"][width:].any()
            assert not linears["up_proj"][width:].any()
            assert not linears["down_proj"][:, width:].any()
            assert linears["gate_proj"][:width].any(-1).all()
            assert linears["up_proj"][:width].any(-1).all()
            padded += linears["gate_proj"].shape[0] - width
    assert padded > 0
    scales = [tensor for name, tensor in tensors(output).items() if name.endswith("weight_scale")]
    assert all(torch.isfinite(scale).all() for scale in scales)


def recipe(block_size: int, quantizer: Any, sparsity: float = 0.4) -> list[Any]:
    return [
        AttributionModifier(channel_metric="activation"),
        CoverageModifier(sparsity=sparsity, **paper_method.EVEN_LAYERS),
        AlignmentModifier(block_size=block_size, min_width=block_size, **paper_method.ALIGNMENT),
        ChannelPruningModifier(pictures=False, **paper_method.PRUNING),
        quantizer,
    ]


def grouped(group_size: int, **weights: Any) -> dict[str, Any]:
    group = json.loads(json.dumps(W4["config_groups"]["group_0"]))
    group["weights"] |= {"group_size": group_size, **weights}
    return {"config_groups": {"group_0": group}, "ignore": W4["ignore"]}


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_blocks_of_every_size(tmp_path, block_size):
    """Case 8: widths in blocks of 64, with groups of 64, work as those of 128 do."""
    model = source(tmp_path / "in", moe_intermediate_size=384)
    quantizer = QuantizationModifier(**grouped(block_size))
    options = {"dataset": token_batches(samples=4, length=16), "shuffle_calibration_samples": False}
    pruned = oneshot(
        model=str(model), recipe=recipe(block_size, quantizer), output_dir=str(tmp_path / "out"), **options
    )
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert math.gcd(*manifest.distinct_widths) == manifest.block_size == block_size
    assert len(manifest.distinct_widths) > 2
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(pruned), rtol=1e-4, atol=1e-4)


def test_static_activation_order_does_not_move_columns(tmp_path):
    """Case 3: GPTQ in static activation order, groups of 32, stores no g_idx, so ranks can be cut anywhere.

    Each group of columns has its own scale, in the order of the columns, and ranks are cut between groups.
    """
    model = source(tmp_path / "in")
    modifiers = recipe(BLOCK, GPTQModifier(**grouped(BLOCK, actorder="static")))
    pruned = oneshot(model=str(model), recipe=modifiers, output_dir=str(tmp_path / "out"), **DATA)
    found = tensors(tmp_path / "out")
    assert not any(name.endswith("g_idx") for name in found)
    for name, packed in found.items():
        if name.endswith("weight_packed"):
            assert found[name.replace("weight_packed", "weight_scale")].shape[1] == packed.shape[1] * 8 // BLOCK
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(pruned), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantizer", [QuantizationModifier, GPTQModifier])
def test_experts_that_no_token_reached_are_quantized_too(tmp_path, log, quantizer):
    """Case 10, case 17: experts without tokens are quantized like others, at finite scales, and are logged."""
    model = source(tmp_path / "in")
    modifiers = recipe(BLOCK, quantizer(**W4), sparsity=0.0)
    few = DATA | {"dataset": token_batches(samples=1, length=2)}
    pruned = oneshot(model=str(model), recipe=modifiers, output_dir=str(tmp_path / "out"), **few)
    unreached = json.loads((tmp_path / "out" / REPORT_NAME).read_text())["experts_without_tokens"]
    assert sum(map(len, unreached.values())) >= 2 * (8 - 4), "two tokens reach at most four of eight experts"
    for name, experts in unreached.items():
        assert any(f"No calibration token reached experts {experts} of {name}" in line for line in log)
    found = tensors(tmp_path / "out")
    for name, widths in Manifest.from_checkpoint(tmp_path / "out").widths.items():
        for expert in range(len(widths)):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                scale = found[f"{name}.{expert}.{projection}.weight_scale"]
                assert torch.isfinite(scale).all()
                assert (scale > 0).all()
                assert f"{name}.{expert}.{projection}.weight" not in found
    assert torch.isfinite(logits(load(tmp_path / "out"))).all()
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(pruned), rtol=1e-4, atol=1e-4)
