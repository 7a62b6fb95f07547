"""Builds the model of a checkpoint without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from moe_coverage_plugin.checkpoint.expert_names import keep_family_names
from moe_coverage_plugin.checkpoint.model_config import convert_errors
from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers
from moe_coverage_plugin.modeling.slicing import prune_layer


def build_skeleton(
    config: PretrainedConfig, manifest: Manifest, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """Build a model without weights whose experts are linear layers of the widths in the manifest.

    Raises:
        CoverageError: transformers cannot build the model, or it has other MoE layers or experts than the manifest.
    """
    names: list[str] = []
    with init_empty_weights(include_buffers=False):
        for factory in _factories(config, trust_remote_code):
            with convert_errors(Path(config._name_or_path) / "config.json"):
                model = factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            layers = _linear_layers(model, config)
            if sorted(names := [layer.name for layer in layers]) == sorted(manifest.widths):
                break
        else:
            raise CoverageError(
                f"the manifest names the MoE layers {list(manifest.widths)}, {config.model_type} has {names}: config "
                "and manifest are not of the same model, copy config.json again"
            )
        for layer in layers:
            widths = manifest.widths[layer.name]
            if len(widths) != layer.num_experts:
                raise CoverageError(
                    f"{layer.name} has {layer.num_experts} experts, its manifest lists {len(widths)} widths: config "
                    "and manifest are not of the same model, copy config.json again"
                )
            prune_layer(layer, [torch.arange(width) for width in widths])
    # a text part is built from its own config, which has no path
    model.config._name_or_path = model.name_or_path = config._name_or_path
    if factory is AutoModelForCausalLM and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        # saved by transformers, the text part of a multimodal model keeps the tensor names of the multimodal model
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    keep_family_names(model)
    return model


def _factories(config: PretrainedConfig, trust_remote_code: bool) -> list[Any]:
    """Return the classes that can have built the model; some families have two for the same config.

    One of the two is the multimodal model, the other its text part.
    """
    own_code = getattr(config, "auto_map", {}) if trust_remote_code else {}
    if "AutoModelForCausalLM" in own_code:
        return [AutoModelForCausalLM]
    mappings = {
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    # for a config that is in neither mapping, transformers raises an error that explains it
    return [factory for factory, known in mappings.items() if type(config) in known] or [AutoModelForCausalLM]


def _linear_layers(model: PreTrainedModel, config: PretrainedConfig) -> list[MoELayer]:
    for name, module in get_non_linearized_moes(model):
        linear_experts = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        model.set_submodule(name, linear_experts(getattr(module, "config", config)))
    linearize_expert_lists(model)
    return find_moe_layers(model)
