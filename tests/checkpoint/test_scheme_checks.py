"""Layers that engines fuse share one scheme, and no scale is left without a value."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.checkpoint.calibrated_scales import complete_scales, mark_scales
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.modifiers.harness import W4_GROUP_64, compress, pruning, refusal, save_tiny
from tests.tiny import GROUP_LIMITED, add_tokenizer, token_batches

pytestmark = pytest.mark.slow

W4 = W4_GROUP_64["config_groups"]["group_0"]
W8 = W4 | {"weights": W4["weights"] | {"num_bits": 8}}
GROUP_32 = W4 | {"weights": W4["weights"] | {"group_size": 32}}
ASYMMETRIC = W4 | {"weights": W4["weights"] | {"symmetric": False}}
OTHER_OBSERVER = W4 | {"weights": W4["weights"] | {"observer": "mse"}}
NEVER = ["lm_head", "re:.*shared_expert_gate$"]
OTHERS = r"re:.*(o_proj|down_proj|experts\.\d+\.(gate|up)_proj)$"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("schemes") / "qwen2_moe", "qwen2_moe")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention whose first projections vLLM fuses."""
    path = tmp_path_factory.mktemp("schemes") / "deepseek_v2"
    return add_tokenizer(save_tiny(path, "deepseek_v2", **{"num_hidden_layers": 2} | GROUP_LIMITED))


def groups(*pairs: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
    """Options of a quantizer with one group for each pair of a scheme and its targets."""
    return {
        "config_groups": {f"group_{i}": scheme | {"targets": targets} for i, (scheme, targets) in enumerate(pairs)},
        "ignore": NEVER,
    }


@pytest.mark.parametrize(
    ("quantizer", "words"),
    [
        (W4_GROUP_64 | {"ignore": [*NEVER, "re:.*k_proj$"]}, r"q_proj with weights in 4 bits .*k_proj in 16 bits"),
        (W4_GROUP_64 | {"ignore": [*NEVER, "model.layers.1.self_attn.q_proj"]}, r"layers\.1.*q_proj in 16 bits and"),
        (
            W4_GROUP_64 | {"ignore": [*NEVER, r"re:.*shared_expert\.up_proj$"]},
            r"shared_expert.gate_proj with.*up_proj",
        ),
        (
            groups((W4, [OTHERS, "re:.*q_proj"]), (W8, ["re:.*[kv]_proj", r"re:.*shared_expert\..*"])),
            "4 bits .* 8 bits",
        ),
        (groups((GROUP_32, ["re:.*v_proj"]), (W4, ["Linear"])), r"groups of 64 and \S+v_proj .* groups of 32"),
        (groups((ASYMMETRIC, ["re:.*v_proj"]), (W4, ["Linear"])), "fuse q_proj, k_proj, v_proj into one layer"),
    ],
    ids=["ignored", "ignored in a layer", "shared expert", "bits", "group size", "zero points"],
)
@pytest.mark.parametrize("kind", [GPTQModifier, QuantizationModifier])
def test_fused_layers_that_would_differ(source: Path, tmp_path: Path, kind: type, quantizer: dict, words: str):
    """vLLM fuses these layers, and stops at, or misreads, parts of several schemes."""
    message = refusal(source, [*pruning(), kind(**quantizer)], tmp_path / "out")
    assert re.search(words, message)
    assert "with one scheme, or none" in message


def test_fused_layers_of_latent_attention(latent: Path, tmp_path: Path):
    quantizer = QuantizationModifier(**W4_GROUP_64 | {"ignore": [*NEVER, "re:.*q_a_proj$", "re:.*layers.0.mlp.*"]})
    message = refusal(latent, [*pruning(), quantizer], tmp_path / "out")
    assert "fuse q_a_proj, kv_a_proj_with_mqa into one layer" in message


def test_fused_layers_of_several_quantizers(source: Path, tmp_path: Path):
    recipe = [
        QuantizationModifier(**groups((W4, [OTHERS, "re:.*q_proj$", r"re:.*shared_expert\..*"]))),
        QuantizationModifier(**groups((W8, ["re:.*[kv]_proj$"]))),
    ]
    assert "q_proj, k_proj, v_proj" in refusal(source, [*pruning(), *recipe], tmp_path / "out")


@pytest.mark.parametrize(
    "quantizer",
    [
        W4_GROUP_64 | {"ignore": [*NEVER, "re:.*self_attn.*"]},
        W4_GROUP_64 | {"ignore": [*NEVER, r"re:.*shared_expert\..*"]},
        groups((OTHER_OBSERVER, ["re:.*v_proj"]), (W4, ["Linear"])),
        W4_GROUP_64 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}},
    ],
    ids=["no attention", "no shared expert", "another observer", "key-value cache"],
)
def test_fused_layers_that_are_alike(source: Path, quantizer: dict):
    """How a scale is found does not matter, and all of a fused layer may be left out."""
    compress(source, [*pruning(), QuantizationModifier(**quantizer)])


def test_fused_layers_are_checked_before_saving(source: Path, tmp_path: Path):
    """A quantizer that runs on a pruned model without this package's modifiers is checked when it is saved."""
    model = compress(source, pruning())
    compress(model, QuantizationModifier(**W4_GROUP_64 | {"ignore": [*NEVER, "re:.*k_proj$"]}))
    with pytest.raises(CoverageError, match=r"the model has .*q_proj with weights in 4 bits .*k_proj in 16 bits"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- scales


def static_fp8(source: Path, **options: Any) -> PreTrainedModel:
    quantizer = QuantizationModifier(targets=["Linear"], scheme="FP8", ignore=NEVER)
    return compress(source, [*pruning(layout="padded"), quantizer], dataset=token_batches(1, 3), **options)


def test_experts_without_tokens_get_the_largest_scale(source: Path, tmp_path: Path, log: list[str]):
    """Deliver 3: the toolkit leaves their scales of activations as allocated, which was saved."""
    model = static_fp8(source, moe_calibrate_all_experts=False)
    scales = {layer.name: [float(mlp.up_proj.input_scale) for mlp in layer.mlps] for layer in find_moe_layers(model)}
    empty = {name: [i for i, scale in enumerate(found) if scale != scale] for name, found in scales.items()}
    assert any(empty.values()), "all experts got tokens: use fewer"
    model.save_pretrained(tmp_path / "out")
    assert any(f"reached {sum(map(len, empty.values()))} experts" in message for message in log)
    for layer in find_moe_layers(load(tmp_path / "out")):
        found = [float(mlp.up_proj.input_scale) for mlp in layer.mlps if hasattr(mlp.up_proj, "input_scale")]
        assert all(0 < scale < 1e3 for scale in found)
    for layer in find_moe_layers(model):
        largest = max(scale for scale in scales[layer.name] if scale == scale)
        assert all(float(layer.mlps[i].up_proj.input_scale) == largest for i in empty[layer.name])


@pytest.mark.parametrize("opened", ["oneshot", "load", "pickle"])
def test_a_quantizer_alone_on_a_pruned_model(source: Path, tmp_path: Path, log: list[str], opened: str):
    """Deliver 3: without a modifier of this package in the recipe, as well."""
    model = compress(source, pruning(layout="padded"), output_dir=str(tmp_path / "pruned"))
    if opened == "load":
        model = load(tmp_path / "pruned")
    elif opened == "pickle":
        model = pickle.loads(pickle.dumps(model))
    quantizer = QuantizationModifier(targets=["Linear"], scheme="FP8", ignore=NEVER)
    compress(model, quantizer, dataset=token_batches(1, 3), moe_calibrate_all_experts=False)
    scales = [float(mlp.up_proj.input_scale) for layer in find_moe_layers(model) for mlp in layer.mlps]
    empty = sum(scale != scale for scale in scales)
    assert empty, "all experts got tokens: use fewer"
    model.save_pretrained(tmp_path / "out")
    assert any(f"reached {empty} experts" in message for message in log)
    load(tmp_path / "out")


def test_a_second_quantizer_keeps_the_scales_of_the_first(source: Path, tmp_path: Path):
    model = compress(source, [*pruning(), QuantizationModifier(**W4_GROUP_64)])
    before = {name: tensor.clone() for name, tensor in model.named_parameters() if name.endswith("weight_scale")}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    compress(
        model, QuantizationModifier(targets=["Linear"], ignore=["re:.*(_proj|gate|lm_head)$"], kv_cache_scheme=cache)
    )
    after = dict(model.named_parameters())
    assert before
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(bool(after[name].isfinite().all()) for name in after if name.endswith(("k_scale", "v_scale")))


def test_quantizers_of_other_models_are_left_alone(source: Path):
    unpruned = AutoModelForCausalLM.from_pretrained(source)
    compress(source, pruning())
    quantizer = QuantizationModifier(targets=["Linear"], scheme="FP8", ignore=NEVER)
    quantizer.initialize_quantization(unpruned)
    module = unpruned.model.layers[0].self_attn.q_proj
    assert module.quantization_status == QuantizationStatus.INITIALIZED
    with torch.no_grad():
        module.input_scale.fill_(1.0)
    mark_scales(module)
    assert bool(module.input_scale.isnan())


def test_experts_that_all_see_all_tokens_keep_their_scales(source: Path, log: list[str]):
    model = static_fp8(source)
    before = {name: tensor.clone() for name, tensor in model.named_parameters() if name.endswith("scale")}
    complete_scales(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters() if name in before)
    assert not [message for message in log if "their scales of activations" in message]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 7e20])
@pytest.mark.parametrize("name", ["self_attn.q_proj.weight_scale", "mlp.experts.{}.up_proj.weight_scale"])
def test_scales_without_a_value_stop_before_anything_is_written(source: Path, tmp_path: Path, value: float, name: str):
    """Deliver 3: also if what the memory held before looks like a number."""
    model = compress(source, [*pruning(), QuantizationModifier(**W4_GROUP_64)])
    layer = find_moe_layers(model)[0]
    path = name.format(next(index for index, width in enumerate(layer.widths) if width))
    module, _, attribute = f"model.layers.0.{path}".rpartition(".")
    with torch.no_grad():
        getattr(model.get_submodule(module), attribute).fill_(value)
    with pytest.raises(CoverageError, match=rf"{re.escape(module)}.weight_scale is .*moe_calibrate_all_experts=True"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [GPTQModifier, QuantizationModifier])
def test_weights_of_experts_without_tokens_are_quantized(source: Path, tmp_path: Path, kind: type):
    """Deliver 3: these quantizers find scales of weights without tokens."""
    model = compress(
        source, [*pruning(), kind(**W4_GROUP_64)], dataset=token_batches(1, 3), moe_calibrate_all_experts=False
    )
    model.save_pretrained(tmp_path / "out")
    load(tmp_path / "out")
