"""4 bits by bitsandbytes for experts of any width: the outputs of the rounded weights, and no byte for padding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.nn import Linear, Parameter
from transformers import BitsAndBytesConfig, GPTQConfig, PreTrainedModel

from moe_coverage_plugin import AttributionModifier, ChannelPruningModifier, CoverageError, CoverageModifier, load
from moe_coverage_plugin.modeling import nf4
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers, linears_that_must_stay
from tests import paper_method
from tests.checkpoint.runs import W4, logits, prompt, prune, source
from tests.tiny import token_batches

pytestmark = pytest.mark.slow

BLOCK, SCALE_BYTES = 64, 4


def config(**options: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} | options)


def four_bit(model: PreTrainedModel) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


@torch.no_grad()
def rounded(path: Path, names: set[str], dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
    """The 16-bit model, with some of its weights quantized by bitsandbytes and dequantized."""
    model = load(path, dtype)
    for name in names:
        linear = model.get_submodule(name)
        linear.weight = Parameter(dequantize_4bit(*quantize_4bit(linear.weight.detach(), **options)))
    return model


@pytest.fixture(autouse=True)
def _not_compiled():
    """bitsandbytes compiles for every odd width, which takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("dense") / "in")


@pytest.fixture(scope="module")
def aligned_widths(dense: Path) -> Path:
    """Blocks of 32, some experts removed."""
    prune(dense, dense.with_name("aligned"))
    return dense.with_name("aligned")


@pytest.fixture(scope="module")
def exact_widths(dense: Path) -> Path:
    """Exact to the channel."""
    recipe = [
        AttributionModifier(channel_metric="activation"),
        CoverageModifier(sparsity=0.4, **paper_method.EVEN_LAYERS),
        ChannelPruningModifier(pictures=False, **paper_method.PRUNING),
    ]
    data: dict[str, Any] = {"dataset": token_batches(samples=4, length=16), "shuffle_calibration_samples": False}
    oneshot(model=str(dense), recipe=recipe, output_dir=str(dense.with_name("exact")), **data)
    return dense.with_name("exact")


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", ["aligned_widths", "exact_widths"])
def test_outputs_are_those_of_the_rounded_weights(request, widths, dtype, double):
    path = request.getfixturevalue(widths)
    found = {width for layer in find_moe_layers(load(path)) for width in layer.widths}
    assert any(width % 2 for width in found) if widths == "exact_widths" else 0 in found
    model = load(
        path, dtype, quantization_config=config(bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype)
    )
    names = set(four_bit(model))
    expected = logits(rounded(path, names, dtype, quant_type="nf4", compress_statistics=double))
    assert not torch.equal(expected, logits(load(path, dtype)))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


def test_the_other_four_bits(aligned_widths):
    """FP4, the default of BitsAndBytesConfig."""
    model = load(aligned_widths, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    expected = logits(rounded(aligned_widths, set(four_bit(model)), quant_type="fp4"))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_every_width_takes_half_a_byte_per_weight(exact_widths):
    """No padding: blocks continue in the next row, and the hidden size is a multiple of a block."""
    model = load(exact_widths, quantization_config=config())
    for layer in find_moe_layers(model):
        for linear in expert_linears(layer):
            numbers = linear.in_features * linear.out_features
            assert linear.weight.nbytes == numbers / 2
            assert linear.weight.quant_state.absmax.nbytes == numbers / BLOCK * SCALE_BYTES


def test_it_generates(exact_widths):
    model = load(exact_widths, quantization_config=config())
    generated = model.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 16)
    assert model.is_loaded_in_4bit
    assert model.config.quantization_config.bnb_4bit_quant_type == "nf4"
    with pytest.raises(ValueError, match="dtype"):
        model.to(torch.bfloat16)


# a gate of shared experts, a head that is tied, latent attention and a dense layer, and experts with biases
@pytest.mark.parametrize("family", ["qwen2_moe", "ernie4_5_moe", "deepseek_v3", "gpt_oss"])
def test_routing_and_the_head_are_not_quantized(tmp_path, family):
    prune(source(tmp_path / "in", family), tmp_path / "out", sparsity=0.2)
    dense = load(tmp_path / "out")
    kept = {*linears_that_must_stay(find_moe_layers(dense)).values(), "lm_head"}
    expected = {name for name, module in dense.named_modules() if type(module) is Linear and name not in kept}
    model = load(tmp_path / "out", quantization_config=config())
    assert set(four_bit(model)) == expected
    assert any(".experts." in name for name in expected)
    assert any("attn" in name for name in expected)
    reference = rounded(tmp_path / "out", expected, quant_type="nf4")
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=1e-5)


def test_the_caller_may_leave_out_more(aligned_widths):
    given = config(llm_int8_skip_modules=["o_proj", "model.layers.1"])
    names = set(four_bit(load(aligned_widths, quantization_config=given)))
    assert given.llm_int8_skip_modules == ["o_proj", "model.layers.1"]
    assert names
    assert all(name.startswith("model.layers.0.") and not name.endswith("o_proj") for name in names)


@torch.no_grad()
def test_cpus_that_multiply_bfloat16(exact_widths, monkeypatch):
    """bitsandbytes would pack weights again in the first forward pass, for some widths only and unreadably."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = load(exact_widths, torch.bfloat16, quantization_config=config())
    layers = four_bit(model).values()
    expected = [nf4.dense_weight(linear) for linear in layers]
    model(prompt())
    for linear, weight in zip(layers, expected, strict=True):
        assert linear(torch.zeros(0, linear.in_features, dtype=torch.bfloat16)).shape == (0, linear.out_features)
        assert torch.equal(nf4.dense_weight(linear), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", ["aligned_widths", "exact_widths"])
def test_on_a_card(request, widths):
    path = request.getfixturevalue(widths)
    expected = logits(load(path, quantization_config=config()))
    model = load(path, quantization_config=config()).to("cuda")
    with torch.no_grad():
        found = model(prompt().cuda()).logits.cpu()
        one_by_one = model.generate(prompt().cuda(), max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert one_by_one.shape == (2, 16)


# --- errors ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "load_in_8bit"),
        (BitsAndBytesConfig(), "load_in_4bit=True and 'nf4'"),
        (config(bnb_4bit_quant_type="int4"), "'int4'"),
        (GPTQConfig(bits=4), "GPTQConfig"),
        ({"load_in_4bit": True}, "dict"),
    ],
    ids=["8 bits", "nothing", "type", "gptq", "dict"],
)
def test_other_quantizations(aligned_widths, given, message):
    with pytest.raises(CoverageError, match=message):
        load(aligned_widths, quantization_config=given)


def test_a_checkpoint_that_is_quantized_already(dense, tmp_path):
    prune(dense, tmp_path / "out", quantize=True)
    with pytest.raises(CoverageError, match="quantized already"):
        load(tmp_path / "out", quantization_config=config())


def test_without_bitsandbytes(aligned_widths, monkeypatch):
    monkeypatch.setattr(nf4, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(CoverageError, match=r'pip install "\.\[nf4\]" in a clone'):
        load(aligned_widths, quantization_config=config())
    assert torch.isfinite(logits(load(aligned_widths))).all()


def test_it_is_not_saved_nor_compressed_again(dense, tmp_path):
    prune(dense, tmp_path / "uniform", "uniform")
    model = load(tmp_path / "uniform", quantization_config=config())
    with pytest.raises(CoverageError, match=r"uniform was opened in .* not saved: keep .*W4A16"):
        model.save_pretrained(tmp_path / "again")
    with pytest.raises(CoverageError, match="pruned already"):
        prune(model, tmp_path / "pruned")
    # the message is the toolkit's
    with pytest.raises(Exception, match=r"."):
        oneshot(model=model, recipe=[QuantizationModifier(**W4)], output_dir=str(tmp_path / "quantized"))
    assert {path.name for path in tmp_path.iterdir()} == {"uniform"}
