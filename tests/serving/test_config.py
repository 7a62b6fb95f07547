"""Claiming a checkpoint and reading how its experts are stored."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3VLMoeConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat, register
from moe_coverage_plugin.serving.config import CoverageConfig
from moe_coverage_plugin.serving.linear import DecompressedLinearMethod

LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in (1, 2)]
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 64,
    "dynamic": False,
    "actorder": None,
}
GROUP = {"targets": ["Linear"], "format": "pack-quantized", "input_activations": None, "weights": WEIGHTS}


def quantization_config(layout: str = "ragged", bits: int = 4, **weights: Any) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint."""
    widths = [64, 0, 128, 256] if layout == "ragged" else [128] * 4
    manifest = Manifest(layout, 256, dict.fromkeys(LAYERS, widths), block_size=64)  # pyright: ignore[reportArgumentType]  # parametrized
    group = copy.deepcopy(GROUP)
    group["weights"].update(weights)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "dense",
        "config_groups": {"group_0": group} if bits == 4 else {},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        CONFIG_KEY: manifest.to_entry(),
    }


def test_registration_may_be_repeated() -> None:
    """Case 30: the plugin may be registered any number of times."""
    for _ in range(2):
        register()
        assert get_quantization_config(CONFIG_KEY) is CoverageConfig


@pytest.mark.parametrize("layout", ["ragged", "padded", "uniform"])
def test_claims_every_layout(layout: str) -> None:
    assert CoverageConfig.override_quantization_method(quantization_config(layout), None) == CONFIG_KEY


def test_leaves_other_checkpoints_alone() -> None:
    config = quantization_config()
    del config[CONFIG_KEY]
    assert CoverageConfig.override_quantization_method(config, None) is None


def test_unknown_schema_version() -> None:
    config = quantization_config()
    config[CONFIG_KEY]["version"] = 99
    with pytest.raises(CoverageError, match="schema version 99, this release reads 1"):
        CoverageConfig.override_quantization_method(config, None)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (quantization_config(), ExpertScheme(4, 64)),
        (quantization_config(group_size=32), ExpertScheme(4, 32)),
        (quantization_config(strategy="channel", group_size=None), ExpertScheme(4, None)),
        (quantization_config(actorder="static"), ExpertScheme(4, 64)),
        (quantization_config(symmetric=False), ExpertScheme(4, 64, zero_points=True)),
        (quantization_config(bits=16), ExpertScheme(16, None)),
    ],
)
def test_schemes_of_ragged_experts(config: dict[str, Any], scheme: ExpertScheme) -> None:
    assert CoverageConfig.from_config(config).schemes == dict.fromkeys(LAYERS, scheme)


def float8_config(layout: str = "ragged", weights: Any = None, activations: Any = None) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint in ``FP8_DYNAMIC``, except for these fields."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    config = quantization_config(layout, **(common | {"strategy": "channel", "group_size": None} | (weights or {})))
    group = config["config_groups"]["group_0"]
    group["format"] = config["format"] = "float-quantized"
    group["input_activations"] = common | {"strategy": "token", "dynamic": True} | (activations or {})
    return config


def test_float8() -> None:
    assert CoverageConfig.from_config(float8_config()).schemes == dict.fromkeys(LAYERS, ExpertScheme(8))
    assert CoverageConfig.from_config(float8_config("uniform")).schemes == {}


@pytest.mark.parametrize(
    ("weights", "activations", "scheme"),
    [
        ({"strategy": "tensor"}, {}, "float8 weights by tensor, dynamic float8 inputs by token"),
        ({"strategy": "group", "group_size": 64}, {}, "float8 weights by group, dynamic float8 inputs by token"),
        ({}, {"strategy": "tensor"}, "float8 weights by channel, dynamic float8 inputs by tensor"),
        ({}, {"strategy": "tensor", "dynamic": False}, "float8 weights by channel, static float8 inputs by tensor"),
        ({}, {"type": "int"}, "float8 weights by channel, dynamic int8 inputs by token"),
    ],
)
def test_float8_in_other_ways(weights: dict[str, Any], activations: dict[str, Any], scheme: str) -> None:
    with pytest.raises(CoverageError, match=rf"has {scheme}, format float-quantized, but engines serve"):
        CoverageConfig.from_config(float8_config("ragged", weights, activations))


def test_one_width_is_left_to_stock_kernels_where_there_are_any() -> None:
    assert CoverageConfig.from_config(quantization_config("uniform", bits=16)).schemes == {}
    # the build for CPUs has no kernel that can be relied on for 4-bit experts, but kernels for others
    served = CoverageConfig.from_config(quantization_config("uniform")).schemes
    assert served == dict.fromkeys(LAYERS, ExpertScheme(4, 64))
    assert CoverageConfig.from_config(quantization_config("uniform", num_bits=8)).schemes == {}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 8}, "int8 weights"),
        ({"num_bits": 8, "type": "float"}, "float8 weights"),
        ({"strategy": "tensor", "group_size": None}, "weights by tensor"),
        ({"group_size": 128}, "expert 0 has width 64, which is not a multiple of the quantization group size 128"),
    ],
)
def test_unsupported_schemes(weights: dict[str, Any], reason: str) -> None:
    with pytest.raises(CoverageError, match=re.escape(reason)):
        CoverageConfig.from_config(quantization_config(**weights))


def test_activation_order() -> None:
    # some releases of vLLM stop first, with a message of their own
    with pytest.raises(ValueError, match="activation order"):
        CoverageConfig.from_config(quantization_config(actorder="group"))


def test_quantized_activations() -> None:
    config = quantization_config()
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    with pytest.raises(CoverageError, match=r"layers\.1\.mlp\.experts has int4 weights by group, dynamic int8 inputs"):
        CoverageConfig.from_config(config)


@pytest.mark.parametrize("ignored", [f"{LAYERS[1]}.2.down_proj", r"re:.*layers\.2\.mlp\.experts\.2\..*"])
def test_experts_of_one_layer_share_a_scheme(ignored: str) -> None:
    """Case 10, case 11: experts of a layer that are stored in two ways stop an engine before a weight is read."""
    config = quantization_config()
    config["ignore"].append(ignored)
    with pytest.raises(CoverageError, match=r"layers\.2\.mlp\.experts\.2\.\w+ is stored in 16 bits but .* in 4 bits"):
        CoverageConfig.from_config(config)


def test_layers_may_differ_and_removed_experts_do_not_count() -> None:
    config = quantization_config()
    config["ignore"] += [r"re:.*layers\.2\.mlp\.experts.*", f"{LAYERS[0]}.1.down_proj"]
    schemes = CoverageConfig.from_config(config).schemes
    assert schemes == {LAYERS[0]: ExpertScheme(4, 64), LAYERS[1]: ExpertScheme()}


@pytest.mark.parametrize("targets", [["Linear"], [r"re:.*experts\.\d+\..*_proj$"], ["Linear", r"re:.*self_attn.*"]])
def test_experts_are_found_under_any_target(targets: list[str]) -> None:
    """Case 12: vLLM looks for experts under the target "Linear", but quantizers may use other targets."""
    config = quantization_config()
    config["config_groups"]["group_0"]["targets"] = targets
    assert CoverageConfig.from_config(config).schemes == dict.fromkeys(LAYERS, ExpertScheme(4, 64))


def test_width_of_a_nested_config() -> None:
    """Case 28: if the language model has a config of its own, its width is restored, and no other field."""
    config = quantization_config()
    declared = Manifest.from_quantization_config(config).declared_width  # pyright: ignore[reportOptionalMemberAccess]  # just written
    nested = Qwen3VLMoeConfig(text_config={"moe_intermediate_size": declared, "intermediate_size": declared})
    CoverageConfig.from_config(config).maybe_update_config("model", hf_config=nested)
    assert (nested.text_config.moe_intermediate_size, nested.text_config.intermediate_size) == (256, declared)


def test_model_gets_its_original_width_back() -> None:
    for layout, width in {"ragged": 256, "uniform": 128}.items():
        config = quantization_config(layout)
        declared = Manifest.from_quantization_config(config).declared_width  # pyright: ignore[reportOptionalMemberAccess]  # just written
        model_config = Qwen3MoeConfig(moe_intermediate_size=declared, intermediate_size=declared)
        CoverageConfig.from_config(config).maybe_update_config("model", hf_config=model_config)
        assert (model_config.moe_intermediate_size, model_config.intermediate_size) == (width, declared)


@pytest.mark.parametrize("prefix", [LAYERS[1], "language_model.model.layers.2.block_sparse_moe.experts"])
def test_layers_are_found_by_name_or_number(prefix: str) -> None:
    assert CoverageConfig.from_config(quantization_config())._manifest_name(prefix) == LAYERS[1]


@pytest.mark.parametrize("prefix", ["model.layers.0.mlp.experts", "model.mtp.experts"])
def test_layer_that_the_manifest_does_not_list(prefix: str) -> None:
    with pytest.raises(CoverageError, match=rf"{re.escape(prefix)} is not among the 2 layers"):
        CoverageConfig.from_config(quantization_config())._manifest_name(prefix)


def test_hooks_are_entered_once_an_architecture() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    hf_config = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
    hooks = []
    for _ in range(2):
        CoverageConfig.override_quantization_method(quantization_config(), None, hf_config=hf_config)  # pyright: ignore[reportArgumentType]  # only this is read
        hooks.append(MODELS_CONFIG_MAP["Qwen3MoeForCausalLM"])
    assert hooks[0] is hooks[1]


@pytest.mark.skipif(not compat.lacks_w4a16_linear(), reason="this build has a kernel")
def test_linear_layers_of_other_bits_on_a_build_without_a_kernel() -> None:
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(layer)
    path = "model.layers.1.self_attn.o_proj"

    def with_bits(bits: int) -> CoverageConfig:
        config = quantization_config()
        attention = copy.deepcopy(GROUP) | {"targets": ["re:.*self_attn.*"]}
        attention["weights"]["num_bits"] = bits
        config["config_groups"] = {"attention": attention, **config["config_groups"]}
        return CoverageConfig.from_config(config)

    assert isinstance(with_bits(4).get_quant_method(layer, path), DecompressedLinearMethod)
    with pytest.raises(CoverageError, match=rf"{re.escape(path)} has packed 8-bit weights, .* quantize it with W4A16"):
        with_bits(8).get_quant_method(layer, path)
