"""Lets peft adapt the experts of our models, which are linear layers.

The transformers class of a family can hold all experts of a layer in two tensors. For such families peft rewrites the
targets of LoRA from names of linear layers to those of the tensors, by the name of the family alone, and renames the
weights of adapters in the same way. In a model with linear experts the tensors do not exist, so that experts would
stay frozen. And peft divides by the norms of rows (DoRA), which are 0 in experts that are padded with zeros.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

import torch
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor
from torch.nn import Linear, Module
from transformers.core_model_loading import WeightConverter
from transformers.integrations import peft as adapter_methods

from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import ROUTER_NAMES

# names that experts have in checkpoints or in models with fused experts, but not in ours
FUSED_NAMES = frozenset(("w1", "w2", "w3", "gate_up_proj", "input_linear", "output_linear"))
REMEDY = f"target_modules={list(PROJECTIONS)}"


def keep_linear_targets(conversions: ModuleType) -> None:
    """Make peft leave targets and weights of adapters unchanged if a model has linear experts.

    Args:
        conversions: peft's module ``peft.utils.transformers_weight_conversion``.
    """
    convert_config = conversions.convert_peft_config_for_transformers
    convert_weights = conversions.convert_peft_adapter_state_dict_for_transformers

    @wraps(convert_config)
    def convert_config_of_fused(peft_config: Any, model: Module, *args: Any, **kwargs: Any) -> None:
        if has_linear_experts(model):
            check_targets(peft_config, model)
        else:
            convert_config(peft_config, model, *args, **kwargs)

    @wraps(convert_weights)
    def convert_weights_of_fused(
        model: Module, peft_config: Any, adapter_state_dict: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        if has_linear_experts(model):
            return adapter_state_dict
        return convert_weights(model, peft_config, adapter_state_dict, *args, **kwargs)

    # patch: peft-targets
    conversions.convert_peft_config_for_transformers = convert_config_of_fused  # type: ignore[attr-defined]
    conversions.convert_peft_adapter_state_dict_for_transformers = (  # type: ignore[attr-defined]
        convert_weights_of_fused
    )
    _load_adapters_unchanged()
    _divide_by_positive_norms()


def _load_adapters_unchanged() -> None:
    """Do the same for ``model.load_adapter`` of transformers, which takes the conversions of the model's weights."""
    get_mapping = adapter_methods.get_model_conversion_mapping  # pyright: ignore[reportPrivateImportUsage] - replaced

    @wraps(get_mapping)
    def get_mapping_of_fused(model: Any, *args: Any, **kwargs: Any) -> Any:
        mapping = get_mapping(model, *args, **kwargs)
        if not has_linear_experts(model):
            return mapping
        return [transform for transform in mapping if not isinstance(transform, WeightConverter)]

    # patch: peft-targets
    adapter_methods.get_model_conversion_mapping = get_mapping_of_fused  # type: ignore[attr-defined]


def _divide_by_positive_norms() -> None:
    from peft.tuners.lora.dora import DoraLinearLayer

    get_weight_norm = DoraLinearLayer.get_weight_norm

    @wraps(get_weight_norm)
    def get_positive_norm(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        norm_O = get_weight_norm(self, *args, **kwargs)
        return norm_O.clamp(min=torch.finfo(norm_O.dtype).tiny)

    # patch: peft-zero-rows
    DoraLinearLayer.get_weight_norm = get_positive_norm


def has_linear_experts(model: Module) -> bool:
    """Return whether the experts of a model are in llm-compressor's container of linear layers."""
    return any(isinstance(module, LinearExperts2D) for module in model.modules())


def check_targets(config: Any, model: Module) -> None:
    """Check that the targets of an adapter exist in a model with linear experts.

    Peft itself stops only if no target exists, so that experts could stay frozen beside other targets. A router that
    is not a linear layer becomes a target parameter, as in the models for which peft rewrites targets.

    Args:
        config: peft's config of the adapter, changed in place.
        model: with linear experts.

    Raises:
        CoverageError: a target names experts that this model does not have.
    """
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, list | tuple | set):
        for target in sorted(targets):
            found = [module for name, module in model.named_modules() if _ends_with(name, target)]
            last = target.rpartition(".")[2]
            if not found and last in FUSED_NAMES:
                raise CoverageError(
                    f"target_modules of the adapter has {target!r}, which is not a module of this model: its experts "
                    f"are linear layers, use {REMEDY}"
                )
            if found and last in ROUTER_NAMES and all(_is_plain_router(module) for module in found):
                config.target_modules = set(config.target_modules) - {target}
                config.target_parameters = {*(config.target_parameters or ()), f"{target}.weight"}
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for target in sorted(getattr(config, "target_parameters", None) or ()):
        if not any(_ends_with(name, target) for name in names):
            raise CoverageError(
                f"target_parameters of the adapter has {target!r}, which is not a parameter of this model: "
                f"its experts are linear layers, use {REMEDY}"
            )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_plain_router(module: Module) -> bool:
    weight = getattr(module, "weight", None)
    return not isinstance(module, Linear) and isinstance(weight, Tensor) and weight.ndim == 2
