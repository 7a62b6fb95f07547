"""Adapters on experts in NF4: outputs, gradients, merged weights, and a complete fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from torch.nn import Linear, Parameter
from transformers import BitsAndBytesConfig, PreTrainedModel

from moe_coverage_plugin import CoverageError, Manifest, finetune, load
from moe_coverage_plugin.modeling import nf4
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers
from moe_coverage_plugin.recovery import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import attach
from moe_coverage_plugin.recovery.experts import grouped_experts
from moe_coverage_plugin.recovery.source import NO_EXPERT
from tests.checkpoint.runs import aligned, config_json, logits, prompt, tensors

pytestmark = pytest.mark.slow

OPTIONS = RecoveryOptions(expert_rank=5, router_rank=3)


@torch.no_grad()
def rounded(path: Path) -> PreTrainedModel:
    """The 16-bit model with expert weights rounded to NF4 by bitsandbytes."""
    model = load(path)
    for layer in find_moe_layers(model):
        for linear in expert_linears(layer):
            weight = linear.weight.detach()
            linear.weight = Parameter(dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")))
    return aligned(model)


def in_nf4(path: Path) -> PreTrainedModel:
    config: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": [NO_EXPERT]}
    return load(path, quantization_config=BitsAndBytesConfig(load_in_4bit=True, **config))


def adapted(model: PreTrainedModel) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """Adapters with values as after training, logits, and gradients of the loss."""
    adapters = attach(model, OPTIONS)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapters.parameters.items():
            scale = 0.1 * float(parameter.abs().mean()) if name.endswith(".m") else 0.05
            parameter.copy_(parameter.abs().mean() if name.endswith(".m") else 0.0)
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    with grouped_experts(adapters.adapted):
        model(input_ids=prompt(), labels=prompt()).loss.backward()
        slopes = {name: parameter.grad.clone() for name, parameter in adapters.parameters.items()}
        return adapters, logits(model), slopes


def test_only_experts_are_in_four_bits(pruned):
    model = in_nf4(pruned)
    packed = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    experts = {id(linear) for layer in find_moe_layers(model) for linear in expert_linears(layer)}
    assert {id(model.get_submodule(name)) for name in packed} == experts


def test_adapters_use_the_rounded_weights(pruned):
    """Logits, gradients and merged weights equal those of adapters on the same weights in 16 bit."""
    _, expected, slopes = adapted(rounded(pruned))
    model = in_nf4(pruned)
    adapters, found, gradients = adapted(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, slopes[name], rtol=1e-3, atol=1e-5, msg=name)
    adapters.merge()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    for layer in find_moe_layers(model):
        assert all(type(linear) is Linear and linear.weight.dtype == torch.float32 for linear in expert_linears(layer))


def test_initial_magnitudes_are_the_norms_of_rounded_rows(pruned):
    model = in_nf4(pruned)
    before = logits(model)
    attach(model, OPTIONS)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def recovered(pruned: Path, text: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = RecoveryOptions(expert_rank=8, expert_lr=1e-2, steps=6, batch_size=4, sequence_length=32, nf4=True)
    output = tmp_path_factory.mktemp("nf4") / "out"
    return output, finetune(pruned, text, output, options.model_copy(update={"held_out": 0.2}))


def test_a_complete_fine_tuning(pruned, recovered):
    """The result is an ordinary checkpoint with unchanged attention, and rounded and trained experts."""
    output, done = recovered
    assert done.after < done.before - 0.1
    before, after = tensors(pruned), tensors(output)
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if ".experts." in name or name.endswith("mlp.gate.weight")}
    assert config_json(output)["quantization_config"]["config_groups"] == {}
    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    assert "NF4" in manifest.provenance["recovery"][0]["trained_on"]
    loaded = load(output)
    loaded.save_pretrained(output.with_name("again"))
    assert torch.isfinite(logits(loaded)).all()


@pytest.mark.parametrize(
    ("checkpoint", "options", "message"),
    [
        ("four_bits", {}, "quantized already"),
        ("pruned", {"mode": "router"}, "trains no expert"),
        ("missing", {}, r"pip install \"\.\[nf4\]\""),
    ],
)
def test_errors(request, monkeypatch, text, tmp_path, fast, checkpoint, options, message):
    if checkpoint == "missing":
        monkeypatch.setattr(nf4, "is_bitsandbytes_available", lambda: False)
        checkpoint = "pruned"
    path = request.getfixturevalue(checkpoint)
    with pytest.raises(CoverageError, match=message):
        finetune(path, text, tmp_path / "out", fast.model_copy(update={"nf4": True} | options))
    assert not list(tmp_path.iterdir())
