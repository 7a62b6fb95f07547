"""The toolkit's other quantizers and schemes after our pruning: exact when loaded again, or a clear error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.quip import QuIPModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from safetensors.torch import load_file
from transformers import PreTrainedModel

from moe_coverage_plugin import CoverageError, load
from tests.modifiers.harness import W4_GROUP_64, compress, flat_widths, logits, pruning, refusal, save_tiny

pytestmark = pytest.mark.slow

BY_TOKEN: Any = {
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
}
CACHE: Any = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def weights(targets: str = "Linear", **changes: Any) -> dict[str, Any]:
    """One group of 4-bit weights, changed."""
    four_bits = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"targets": [targets], "weights": four_bits | changes}


def quantizer(*groups: dict[str, Any]) -> QuantizationModifier:
    """A quantizer of everything but the head."""
    named: Any = {f"group_{index}": group for index, group in enumerate(groups)}
    return QuantizationModifier(config_groups=named, ignore=["lm_head"])


def preset(scheme: str) -> QuantizationModifier:
    return QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])


def pruned_away(**options: Any) -> list[Modifier]:
    """Our modifiers, at a sparsity that removes experts, without pictures."""
    *others, pruning_modifier = pruning(0.6, **options)
    return [*others, pruning_modifier.model_copy(update={"pictures": False})]


EXACT: dict[str, Any] = {
    "asymmetric": lambda: [quantizer(weights(symmetric=False))],
    "by_channel": lambda: [quantizer(weights(strategy="channel", group_size=None))],
    "three_bits": lambda: [quantizer(weights(num_bits=3))],
    "importance_matrix": lambda: [quantizer(weights(observer="imatrix_mse"))],
    "embedding": lambda: [quantizer(weights("Embedding", num_bits=8), weights())],
    "autoround": lambda: [AutoRoundModifier(**W4_GROUP_64, iters=1, enable_torch_compile=False)],
    "sparsegpt": lambda: [SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["re:.*up_proj$"])],
}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "qwen3_moe", num_hidden_layers=1)


@pytest.mark.parametrize("name", EXACT)
def test_loads_as_it_was_in_memory(one_layer: Path, tmp_path: Path, name: str):
    output = tmp_path / "out"
    model = compress(one_layer, [*pruned_away(), *EXACT[name]()], output_dir=str(output))
    assert 0 in flat_widths(model)
    # on CPUs that multiply bfloat16, AutoRound leaves other weights in it, and the model cannot run
    assert torch.equal(logits(load(output)), logits(model.float()))


# --- 8-bit floats, weights and activations alike

FLOAT8: dict[str, Any] = {
    "all_linear": lambda: [preset("FP8_DYNAMIC")],
    "experts_alone": lambda: [QuantizationModifier(targets=["re:.*experts.*_proj$"], scheme="FP8_DYNAMIC")],
    "gptq": lambda: [GPTQModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["lm_head"])],
    "smoothed": lambda: [SmoothQuantModifier(smoothing_strength=0.5), preset("FP8_DYNAMIC")],
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in FLOAT8), ("all_linear", torch.bfloat16)], ids=str
)
def test_float8(tmp_path: Path, log: list[str], name: str, dtype: torch.dtype):
    """Stored as engines read it, and loaded as it was in memory; ``load`` warns that activations stay unquantized."""
    source = save_tiny(tmp_path / "source", dtype=dtype, num_hidden_layers=1)
    output = tmp_path / "out"
    attribution, coverage, alignment, cut = pruned_away()
    exact = alignment.model_copy(update={"block_size": 1})
    model = compress(source, [attribution, coverage, exact, cut, *FLOAT8[name]()], output_dir=str(output))
    assert 0 in flat_widths(model)
    assert any(width % 2 for width in flat_widths(model)), "a scale is for one row, so any width is possible"
    assert not any("no engine" in line for line in log)
    stored = load_file(output / "model.safetensors")
    quantized = {key.removesuffix("_scale") for key in stored if key.endswith("weight_scale")}
    assert len(quantized) == 3 * sum(map(bool, flat_widths(model))) + (0 if name == "experts_alone" else 4)
    for key in quantized:
        assert stored[key].dtype == torch.float8_e4m3fn
        assert stored[f"{key}_scale"].shape == (len(stored[key]), 1)
        assert (stored[f"{key}_scale"] > 0).all()
    loaded = load(output)
    assert any("Engines quantize the activations of" in line and "which load() does not" in line for line in log)
    assert not torch.equal(logits(loaded), logits(model)), "in memory, activations are quantized"
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            scheme.input_activations = None
    assert torch.equal(logits(loaded), logits(model))


def test_float8_in_a_later_run(one_layer: Path, tmp_path: Path):
    """A quantizer alone, on a checkpoint that was pruned before; it needs no data, and gets none."""
    compress(one_layer, pruned_away(), output_dir=str(tmp_path / "pruned"))
    at_once = compress(one_layer, [*pruned_away(), preset("FP8_DYNAMIC")])
    later = oneshot(model=load(tmp_path / "pruned"), recipe=preset("FP8_DYNAMIC"), output_dir=str(tmp_path / "out"))
    assert torch.equal(logits(later), logits(at_once))
    assert flat_widths(load(tmp_path / "out")) == flat_widths(at_once)


# --- schemes that no engine serves


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8_BLOCK", "MXFP8", "NVFP4", "W4A8", "W4AFP8"])
def test_quantized_activations(pristine: PreTrainedModel, tmp_path: Path, scheme: str):
    message = refusal(pristine, [*pruning(block_size=128), preset(scheme)], tmp_path / "out")
    words = r"^QuantizationModifier would give experts quantized activations \(.*FP8_DYNAMIC or W4A16, or .*'padded'"
    assert re.search(words, message)


def test_quantized_activations_in_a_later_run(one_layer: Path, tmp_path: Path):
    pruned = compress(one_layer, pruned_away())
    with pytest.raises(CoverageError, match=r"experts of model\.layers\.0\.mlp\.experts have quantized activations"):
        compress(pruned, preset("W8A8"), output_dir=str(tmp_path / "out"))
    assert not any(tmp_path.iterdir())


def test_quantized_activations_of_attention_and_one_width_for_all(one_layer: Path, tmp_path: Path, log: list[str]):
    """They run in the kernels of engines; ``load`` leaves them out and warns."""
    attention = weights("re:.*self_attn.*_proj$", type="float", num_bits=8, strategy="channel", group_size=None)
    experts = weights("re:.*experts.*_proj$")
    mixed = quantizer(attention | BY_TOKEN, experts)
    for name, recipe in {
        "mixed": [*pruned_away(), mixed],
        "padded": [*pruned_away(layout="padded"), preset("W8A8")],
    }.items():
        compress(one_layer, recipe, output_dir=str(tmp_path / name))
        assert not any("which load() does not" in line for line in log)
        load(tmp_path / name)
        assert any("Engines quantize the activations of" in line for line in log)
        log.clear()


@pytest.mark.parametrize(
    ("modifier", "reason"),
    [
        (preset("W8A16"), "int8 weights"),
        (preset("NVFP4A16"), "float4 weights"),
        (quantizer(weights(type="float", num_bits=8, strategy="channel", group_size=None)), "float8 weights"),
    ],
    ids=["W8A16", "NVFP4A16", "float8_weights_only"],
)
def test_weights_that_only_load_opens(pristine: PreTrainedModel, tmp_path: Path, log: list[str], modifier, reason):
    """The warning comes before anything is calibrated, here before the error about the output directory."""
    (tmp_path / "here").touch()
    refusal(pristine, [*pruning(block_size=128), modifier], tmp_path / "here" / "out")
    assert any(f"gives experts {reason}" in line and "load() opens but no engine" in line for line in log)


# --- key-value caches


@pytest.mark.parametrize("with_weights", [False, True])
def test_quantized_cache(one_layer: Path, tmp_path: Path, log: list[str], with_weights: bool):
    options: dict[str, Any] = W4_GROUP_64 if with_weights else {"ignore": []}
    plain = compress(one_layer, [*pruned_away(), *([QuantizationModifier(**options)] if with_weights else [])])
    cached = QuantizationModifier(**options, kv_cache_scheme=CACHE)
    compress(one_layer, [*pruned_away(), cached], output_dir=str(tmp_path / "out"))
    assert torch.equal(logits(load(tmp_path / "out")), logits(plain))
    assert any("Engines quantize the key-value cache of" in line for line in log)


# --- modifiers that rescale or rotate


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rotating", [SpinQuantModifier, QuIPModifier])
def test_rotations(pristine: PreTrainedModel, tmp_path: Path, rotating: Any, first: bool):
    recipe: list[Modifier] = [rotating(), *pruning()] if first else [*pruning(), rotating(), quantizer(weights())]
    message = refusal(pristine, recipe, tmp_path / "out")
    assert re.search(
        r"^(SpinQuant|QuIP)Modifier rotates the input of routers and experts but not the routers", message
    )


def test_rotations_in_a_later_run(one_layer: Path, tmp_path: Path):
    pruned = compress(one_layer, pruned_away())
    with pytest.raises(CoverageError, match=r"carries rotations \(SpinQuant, QuIP\)"):
        compress(pruned, SpinQuantModifier(), output_dir=str(tmp_path / "out"))
    assert not any(tmp_path.iterdir())


def test_awq_without_an_accelerator(pristine: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would stop at its first layer, after all scores have been measured."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    message = refusal(pristine, [*pruning(), AWQModifier(), quantizer(weights())], tmp_path / "out")
    assert re.search(r"AWQModifier runs on an accelerator only.*use GPTQModifier", message)
