"""MoE layers are found in every family under their own names; models that cannot be pruned raise an error."""

from __future__ import annotations

import pytest
import torch
import transformers
from llmcompressor.modeling.moe.linearize import linearize_moe
from transformers import AutoModelForCausalLM

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.moe_layers import (
    correction_biases,
    expert_width,
    find_moe_layers,
    linears_that_must_stay,
    uniform_shape,
)
from tests.tiny import COMMON, CONFIGS

# family -> experts, their width, first layer that has some, name of the parent, attribute of the router
SHAPES = {
    "qwen3_moe": (8, 512, 0, "mlp", "gate"),
    "qwen2_moe": (8, 256, 0, "mlp", "gate"),
    "mixtral": (4, 256, 0, "mlp", "gate"),
    "olmoe": (8, 256, 0, "mlp", "gate"),
    "deepseek_v2": (8, 256, 1, "mlp", "gate"),
    "deepseek_v3": (8, 256, 1, "mlp", "gate"),
    "glm4_moe": (8, 256, 1, "mlp", "gate"),
    "granitemoe": (8, 256, 0, "block_sparse_moe", "router"),
    "ernie4_5_moe": (8, 256, 1, "mlp", "gate"),
    "minimax_m2": (8, 256, 0, "mlp", "gate"),
    "qwen3_next": (8, 256, 0, "mlp", "gate"),
    "qwen3_5_moe": (8, 256, 0, "mlp", "gate"),
    "gpt_oss": (4, 256, 0, "mlp", "router"),
}


def linear_model(config):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return linearize_moe(model).eval()


@pytest.fixture(scope="module")
def qwen():
    return linear_model(CONFIGS["qwen3_moe"](moe_intermediate_size=64))


def test_every_tiny_family_is_listed():
    assert SHAPES.keys() == CONFIGS.keys()


@pytest.mark.parametrize("family", SHAPES)
def test_layers_of_a_family(family):
    experts, width, first, parent, router = SHAPES[family]
    model = linear_model(CONFIGS[family]())
    layers = find_moe_layers(model)
    indices = range(first, model.config.num_hidden_layers)
    assert [layer.name for layer in layers] == [f"model.layers.{index}.{parent}.experts" for index in indices]
    assert uniform_shape(layers) == (experts, width)
    for layer in layers:
        assert layer.top_k == 2
        assert layer.experts is model.get_submodule(layer.name)
        assert layer.moe is model.get_submodule(layer.name.rpartition(".")[0])
        assert layer.router is getattr(layer.moe, router)
        assert [expert_width(mlp) for mlp in layer.mlps] == [width] * experts
    has_correction = family in ("glm4_moe", "deepseek_v3", "ernie4_5_moe", "minimax_m2")
    assert bool(correction_biases(layers[0])) == has_correction


def test_modules_that_no_quantizer_may_change():
    model = linear_model(CONFIGS["qwen2_moe"](num_hidden_layers=1, moe_intermediate_size=64))
    names = set(linears_that_must_stay(find_moe_layers(model)).values())
    assert {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"} <= names
    assert not any("experts." in name or name.endswith("_proj") for name in names)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["model.layers.0.mlp.experts"], [1, 2]),
        (["model.layers.1"], [0, 2]),
        (["re:.*layers\\.[02]\\.mlp$"], [1]),
        (["model.layers.0", "re:.*layers\\.2.*"], [1]),
        ([], [0, 1, 2]),
    ],
)
def test_ignore(qwen, ignore, left):
    names = [layer.name for layer in find_moe_layers(qwen, ignore)]
    assert names == [f"model.layers.{i}.mlp.experts" for i in left]


@pytest.mark.parametrize("entry", ["model.layers.7", "re:.*layer_1.*", "lm_head", "model.layers.1.mlp.experts.0"])
def test_ignore_that_matches_no_layer_raises(qwen, entry):
    with pytest.raises(CoverageError, match="matches no MoE layer") as caught:
        find_moe_layers(qwen, ["model.layers.0", entry])
    assert entry in str(caught.value)


def test_ignore_does_not_match_by_prefix_of_a_number():
    model = linear_model(CONFIGS["qwen3_moe"](num_hidden_layers=11, moe_intermediate_size=8, num_experts=2))
    names = [layer.name for layer in find_moe_layers(model, ["model.layers.1"])]
    assert "model.layers.10.mlp.experts" in names
    assert "model.layers.1.mlp.experts" not in names


def test_ignoring_everything_raises(qwen):
    with pytest.raises(CoverageError, match="leaves none of 3"):
        find_moe_layers(qwen, ["re:.*experts$"])


def test_a_dense_model_raises():
    config = transformers.LlamaConfig(**COMMON, intermediate_size=64)
    with pytest.raises(CoverageError, match="no mixture-of-experts layer"):
        find_moe_layers(AutoModelForCausalLM.from_config(config))


def test_a_family_without_top_k_routing_raises():
    """Case 18: Llama 4 multiplies the input of experts by the routing weight, not their output."""
    config = transformers.Llama4TextConfig(
        **COMMON, intermediate_size=64, intermediate_size_mlp=64, num_local_experts=4, head_dim=32
    )
    model = transformers.Llama4ForCausalLM(config)
    for decoder_layer in model.model.layers:
        # the toolkit needs the config of the entire multimodal model here
        decoder_layer.feed_forward.experts.config = transformers.Llama4Config(text_config=config.to_dict())
    with pytest.raises(CoverageError, match="not supported"):
        find_moe_layers(linearize_moe(model))


def test_layers_of_several_shapes_raise(qwen):
    from copy import deepcopy

    from moe_coverage_plugin.modeling.slicing import prune_layer

    model = deepcopy(qwen)
    layers = find_moe_layers(model)
    prune_layer(layers[1], [torch.arange(32)] * 8)
    with pytest.raises(CoverageError, match="differ"):
        uniform_shape(layers)
    prune_layer(layers[0], [torch.arange(32)] * 8)
    prune_layer(layers[2], [torch.arange(32)] * 8)
    assert uniform_shape(layers) == (8, 32)
