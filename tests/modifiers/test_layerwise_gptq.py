"""GPTQ layer by layer: the toolkit's arithmetic on Hessian matrices of routed tokens, alone and behind pruning."""

from __future__ import annotations

import re
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from datasets import Dataset
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import Observer
from torch import Tensor
from torch.nn import Linear, functional

from moe_coverage_plugin import CoverageError, LayerwiseGPTQModifier, load
from moe_coverage_plugin.calibration import layer_inputs
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modifiers import layerwise_gptq
from tests.modifiers.harness import (
    compress,
    compress_causally,
    logits,
    offload_to_disk,
    open_linear,
    pruning,
    refusal,
    save_tiny,
    widths,
)
from tests.modifiers.test_reconstruction_pass import BLOCK, CHANNELS, SMALL, W4, distance, many, recipe
from tests.tiny import add_tokenizer, four_bits, token_batches

pytestmark = pytest.mark.slow

RUN: dict[str, Any] = {"dataset": many(), "batch_size": 8, "moe_calibrate_all_experts": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 64 channels."""
    return add_tokenizer(save_tiny(tmp_path_factory.mktemp("source") / "small", **SMALL))


@pytest.fixture(scope="module")
def alone(small: Path) -> Any:
    """Quantized without pruning; tests leave it unchanged."""
    return compress(small, [LayerwiseGPTQModifier(**W4)], **RUN)


@pytest.fixture(scope="module")
def behind_pruning(small: Path) -> Any:
    """Pruned to a half and quantized; tests leave it unchanged."""
    return compress(small, [*recipe(), LayerwiseGPTQModifier(**W4)], **RUN)


def on_grid(linear: Linear) -> bool:
    """Whether every weight is a multiple of its scale in 4 bits."""
    scale: Any = linear.weight_scale
    steps = linear.weight.unflatten(1, (-1, BLOCK)) / scale[..., None]
    return bool(((steps - steps.round()).abs() < 1e-3).all()) and bool((steps.abs() < 8.5).all())


def quantized(model: Any) -> dict[str, Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and getattr(module, "quantization_scheme", None) is not None
    }


@torch.no_grad()
def inputs_of_experts(model: Any, dataset: Dataset) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What the experts of each layer get in the model's own forward."""
    found: list[Any] = []
    handles = [
        layer.experts.register_forward_pre_hook(lambda _module, args: found.append(args))
        for layer in find_moe_layers(model)
    ]
    model.eval().model(torch.tensor(dataset["input_ids"]))
    for handle in handles:
        handle.remove()
    return found


def by_toolkit(linear: Linear, hessian: Tensor) -> Tensor:
    """The weight that the toolkit's arithmetic makes of a weight and a Hessian matrix."""
    modifier = GPTQModifier(**W4)
    arguments = modifier.resolved_config.config_groups["group_0"].weights  # pyright: ignore[reportAttributeAccessIssue]
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=arguments)
    observer(linear.weight)
    found = observer.get_qparams()
    weight, _, fallback = quantize_weight(
        linear.weight.detach().clone()[None],
        hessian.float().clone()[None],
        found["scale"][None],
        found["zero_point"][None],
        None,
        arguments,
    )
    assert not fallback.any()
    return weight[0]


def share(one: Tensor, other: Tensor) -> float:
    """Of equal entries: a sum in another order can round a weight to the next step."""
    return float(torch.isclose(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6).float().mean())


@torch.no_grad()
def compress_to_nearest(model: Any, before: list[Any], **options: Any) -> Any:
    """Weights rounded to nearest: the toolkit rounds them in the forward of its modules, on a GPU not even there."""
    rounded = compress(model, [*before, QuantizationModifier(**W4)], **options)
    for each in quantized(rounded).values():
        arguments = each.quantization_scheme.weights
        each.weight.copy_(fake_quantize(each.weight, each.weight_scale, each.weight_zero_point, arguments))
    return rounded


# --- arithmetic


def test_the_first_layers_weights_are_those_of_the_toolkit(small: Path, alone: Any):
    """Attention like GPTQModifier; experts by Hessian matrices of their tokens."""
    original = open_linear(small)
    toolkits = compress_causally(open_linear(small), [GPTQModifier(**W4)], tokenizer=str(small), **RUN)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        one, other = (getattr(model.model.layers[0].self_attn, name) for model in (alone, toolkits))
        assert torch.equal(one.weight_scale, other.weight_scale)
        assert share(one.weight, other.weight) > 0.99
    (hidden_TH, ids_TK, _), _ = inputs_of_experts(original, RUN["dataset"])
    experts = (find_moe_layers(model)[0].mlps for model in (original, alone))
    for expert, (old, new) in enumerate(zip(*experts, strict=True)):
        x_MH = hidden_TH[(ids_TK == expert).any(1)]
        for name in ("gate_proj", "up_proj"):
            assert share(getattr(new, name).weight, by_toolkit(getattr(old, name), x_MH.T @ x_MH)) > 0.99
        with torch.no_grad():
            a_MI = functional.silu(old.gate_proj(x_MH)) * old.up_proj(x_MH)
        assert share(new.down_proj.weight, by_toolkit(old.down_proj, a_MI.T @ a_MI)) > 0.99


def test_weights_are_on_the_grid_and_scales_are_final(alone: Any):
    """Of all targets."""
    modules = quantized(alone)
    assert len(modules) == 2 * (4 + 8 * 3)
    assert all(on_grid(module) for module in modules.values())
    assert {module.quantization_status for module in modules.values()} == {QuantizationStatus.FROZEN}
    assert not any(hasattr(module, "weight_observer") for module in modules.values())


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_outputs_are_closer_than_by_rounding_to_nearest(small: Path, alone: Any, behind_pruning: Any, sparsity: float):
    original, ids = open_linear(small), torch.tensor(RUN["dataset"]["input_ids"])
    before = recipe(sparsity=sparsity) if sparsity else []
    nearest = compress_to_nearest(small, before, **RUN)
    assert distance(behind_pruning if sparsity else alone, original, ids) < distance(nearest, original, ids)


def test_ranges_of_least_error_bring_outputs_closer(small: Path, alone: Any):
    """No pass of the toolkit counts inputs, and none of its hooks stays."""
    modifier = LayerwiseGPTQModifier(**W4, weight_observer="imatrix_mse")
    assert not modifier.requires_calibration_data
    model = compress(small, [modifier], **RUN)
    original, ids = open_linear(small), torch.tensor(RUN["dataset"]["input_ids"])
    assert distance(model, original, ids) < distance(alone, original, ids)
    assert all(on_grid(module) for module in quantized(model).values())
    assert not any(module._forward_pre_hooks for module in quantized(model).values())


# --- behind pruning


@pytest.mark.parametrize(("refit", "layout"), [("all", "ragged"), ("down", "padded")])
def test_behind_reconstruction_in_one_pass(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refit: str, layout: str
):
    """The widths are those without a quantizer; the checkpoint opens as the model in memory."""
    monkeypatch.setattr(layerwise_gptq, "visit_layers", None)
    plain = compress(small, recipe(refit=refit, layout=layout), **RUN)
    model = compress(small, [*recipe(refit=refit, layout=layout), LayerwiseGPTQModifier(**W4)], **RUN)
    assert widths(model) == widths(plain)
    assert all(on_grid(module) for module in quantized(model).values())
    expected = logits(model)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out").to(model.device)), expected)


def test_chunks_of_experts_change_nothing(small: Path, behind_pruning: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer_inputs, "EXPERTS_ON_CPU", 3)
    parts = compress(small, [*recipe(), LayerwiseGPTQModifier(**W4)], **RUN)
    for one, other in zip(quantized(behind_pruning).values(), quantized(parts).values(), strict=True):
        assert share(one.weight, other.weight) > 0.99


def test_in_a_pass_of_its_own(small: Path, monkeypatch: pytest.MonkeyPatch):
    """Behind pruning without reconstruction, behind another modifier, and on a model that was pruned before."""
    calls: list[str] = []
    visit = layerwise_gptq.visit_layers
    monkeypatch.setattr(layerwise_gptq, "visit_layers", lambda *args: (calls.append(args[-1]), visit(*args)))
    quantizer = four_bits(16)
    cut = pruning(0.5, block_size=16)
    together = compress(small, [*cut, LayerwiseGPTQModifier(**quantizer)], **RUN)
    in_turn = compress(
        compress(small, pruning(0.5, block_size=16), **RUN), [LayerwiseGPTQModifier(**quantizer)], **RUN
    )
    assert calls == ["Quantization"] * 2
    assert widths(together) == widths(in_turn)
    assert len({width for layer in widths(together) for width in layer}) > 2
    # one run marks attention as causal, the other model is saved and opened
    for one, other in zip(quantized(together).values(), quantized(in_turn).values(), strict=True):
        assert share(one.weight, other.weight) > 0.95


# --- families, places and dtypes


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_families(tmp_path: Path, family: str):
    """With shared experts, a dense layer, biases and another activation."""
    shape = {"intermediate_size": CHANNELS} if family == "gpt_oss" else {}
    source = add_tokenizer(save_tiny(tmp_path / "model", family, moe_intermediate_size=CHANNELS, **shape))
    original, ids = open_linear(source), torch.tensor(RUN["dataset"]["input_ids"])
    model = compress(source, [*recipe(), LayerwiseGPTQModifier(**W4)], **RUN)
    assert all(on_grid(module) for module in quantized(model).values())
    nearest = compress_to_nearest(source, recipe(), **RUN)
    assert distance(model, original, ids) < distance(nearest, original, ids)


def test_an_offloaded_model(small: Path, tmp_path: Path):
    """The same weights as of the model in memory."""
    resident, model = open_linear(small), open_linear(small)
    offload_to_disk(model, tmp_path)
    for each in (resident, model):
        compress(each, [*recipe(), LayerwiseGPTQModifier(**W4)], tokenizer=str(small), **RUN)
    assert widths(model) == widths(resident)
    for one, other in zip(quantized(model).values(), quantized(resident).values(), strict=True):
        assert share(one.weight, other.weight) > 0.95


@pytest.mark.parametrize("fast", [False, True])
def test_a_bfloat16_model(small: Path, monkeypatch: pytest.MonkeyPatch, fast: bool):
    """On processors with and without bfloat16 instructions."""
    features = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": fast}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    original, ids = open_linear(small), torch.tensor(RUN["dataset"]["input_ids"])
    options = {"tokenizer": str(small), **RUN}
    pruned = compress(open_linear(small).bfloat16(), [*recipe(), LayerwiseGPTQModifier(**W4)], **options)
    model = compress(open_linear(small).bfloat16(), [LayerwiseGPTQModifier(**W4)], **options)
    weights = [module.weight for each in (pruned, model) for module in quantized(each).values()]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    # pruning changes the outputs three times as much as rounding, and hides the difference
    nearest = compress_to_nearest(open_linear(small).bfloat16(), [], **options)
    assert distance(model.float(), original, ids) < 0.95 * distance(nearest.float(), original, ids)


def test_experts_without_tokens_are_rounded_to_nearest(small: Path):
    """One token reaches two experts of each layer: the others have scales, and no weight becomes zero for it."""
    one = Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    model = compress(small, [LayerwiseGPTQModifier(**W4)], dataset=one)
    original, rounded = open_linear(small), compress(small, [QuantizationModifier(**W4)], dataset=one)
    reached = [set(ids_TK.flatten().tolist()) for _, ids_TK, _ in inputs_of_experts(original, one)]
    for layer, experts in enumerate(reached):
        mlps = (find_moe_layers(each)[layer].mlps for each in (model, rounded))
        for index, (mlp, nearest) in enumerate(zip(*mlps, strict=True)):
            for name in PROJECTIONS:
                found, twin = getattr(mlp, name), getattr(nearest, name)
                assert torch.equal(found.weight_scale, twin.weight_scale) or name == "down_proj"
                if index not in experts:
                    expected = fake_quantize(
                        twin.weight, twin.weight_scale, twin.weight_zero_point, twin.quantization_scheme.weights
                    )
                    torch.testing.assert_close(found.weight, expected)


def test_linear_layers_behind_experts_and_without_input(small: Path):
    """One behind the experts of its layer sees their outputs, and one that is never called is rounded to nearest."""
    models = []
    for modifier in (LayerwiseGPTQModifier, GPTQModifier):
        model: Any = open_linear(small)
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.behind, layer.unused = (Linear(64, 64, bias=False) for _ in range(2))
            layer.forward = MethodType(forward_and_behind, layer)
        run = RUN | {"tokenizer": str(small)}
        if modifier is GPTQModifier:
            ignored = {"ignore": [*W4["ignore"], "re:.*unused"]}
            models.append(compress_causally(model, [modifier(**W4 | ignored)], **run))
        else:
            models.append(compress(model, [modifier(**W4)], **run))
    ours, toolkits = (model.model.layers[0] for model in models)
    assert share(ours.behind.weight, toolkits.behind.weight) > 0.99
    assert on_grid(ours.unused)
    nearest = fake_quantize(
        toolkits.unused.weight,
        ours.unused.weight_scale,
        ours.unused.weight_zero_point,
        ours.unused.quantization_scheme.weights,
    )
    torch.testing.assert_close(ours.unused.weight, nearest)


def forward_and_behind(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    return layer.behind(type(layer).forward(layer, *args, **kwargs))


# --- errors before calibration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ["Linear"], "scheme": "FP8", "ignore": ["lm_head"]}, "quantizes weights only.*use GPTQModifier"),
        (
            {"targets": ["Linear"], "scheme": "NVFP4A16", "ignore": ["lm_head"]},
            "quantizes weights only.*use GPTQModif",
        ),
        ({**W4, "ignore": []}, r'would quantize lm_head \(1 such layers\).*add "lm_head" to its ignore'),
        ({**W4, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "quantizes weights only.*use GPTQModifier"),
    ],
)
def test_what_this_pass_cannot_quantize(small: Path, tmp_path: Path, fields: dict[str, Any], message: str):
    assert re.search(message, refusal(small, [LayerwiseGPTQModifier(**fields)], tmp_path / "out"))


def test_without_data(small: Path):
    with pytest.raises(CoverageError, match="calibration"):
        compress(small, [LayerwiseGPTQModifier(**W4)], dataset=None)


def test_a_group_that_no_width_allows(small: Path, tmp_path: Path):
    """The checks of quantizers behind pruning hold for this one."""
    modifiers = [*recipe(block_size=16), LayerwiseGPTQModifier(**four_bits(32))]
    assert "group_size 32 but widths will be multiples of 16" in refusal(small, modifiers, tmp_path / "out")


def test_padding_is_not_counted(small: Path):
    """Padded samples give the weights of the same samples without padding."""
    plain = token_batches(samples=8, length=24)
    rows = [ids + [1] * 8 for ids in plain["input_ids"]]
    masks = [mask + [0] * 8 for mask in plain["attention_mask"]]
    padded = Dataset.from_dict({"input_ids": rows, "attention_mask": masks})
    models = [compress(small, [LayerwiseGPTQModifier(**W4)], dataset=each, batch_size=4) for each in (plain, padded)]
    for one, other in zip(*(quantized(model).values() for model in models), strict=True):
        assert share(one.weight, other.weight) > 0.97
