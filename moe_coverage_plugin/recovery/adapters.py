"""What is trained: DoRA on every projection of every expert, a low-rank sum on routers. Merged at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import (
    MoELayer,
    chooses_by_token_table,
    find_moe_layers,
    projections,
)
from moe_coverage_plugin.modeling.nf4 import dense_weight
from moe_coverage_plugin.options import RecoveryOptions

NAME = "default"


class LowRank(Module):
    """A parametrization that adds ``scaling * b @ a`` to a router's weight ``[E, H]``; zero at first."""

    def __init__(self, weight_EH: Tensor, rank: int, scaling: float):
        super().__init__()
        experts, hidden = weight_EH.shape
        options = {"dtype": torch.float32, "device": weight_EH.device}
        self.a_RH = Parameter(torch.empty(rank, hidden, **options))
        self.b_ER = Parameter(torch.zeros(experts, rank, **options))
        torch.nn.init.kaiming_uniform_(self.a_RH, a=math.sqrt(5))
        self.scaling = scaling

    def forward(self, weight_EH: Tensor) -> Tensor:
        return (weight_EH.float() + self.scaling * (self.b_ER @ self.a_RH)).to(weight_EH.dtype)


@dataclass
class Adapters:
    """The adapters of a model.

    Attributes:
        layers: all of the model.
        adapted: the layers whose experts have adapters.
        experts, routers: parameters by name, float32, in one order on every rank.
    """

    model: PreTrainedModel
    layers: list[MoELayer]
    adapted: list[MoELayer] = field(default_factory=list)
    experts: dict[str, Parameter] = field(default_factory=dict)
    routers: dict[str, Parameter] = field(default_factory=dict)
    _router_modules: list[Module] = field(default_factory=list)
    _trainable: list[Parameter] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Experts' first, then routers'."""
        return self.experts | self.routers

    @torch.no_grad()
    def merge(self) -> None:
        """Write the adapters into the weights, in place, and leave the modules as they were before."""
        for layer in self.adapted:
            for mlp in layer.mlps:
                for name, adapted in _adapted(mlp).items():
                    setattr(mlp, name, _merged(adapted))
            del layer.experts.peft_config, layer.experts.is_loaded_in_4bit
        for module in self._router_modules:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())


def require_peft() -> None:
    """Refuse to begin where peft is missing.

    Raises:
        CoverageError: as said.
    """
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError as error:
        raise CoverageError(
            'fine-tuning needs peft, which is not installed here: pip install "moe-coverage-plugin[finetune]"'
        ) from error


def attach(model: PreTrainedModel, options: RecoveryOptions) -> Adapters:
    """Freeze the model and put adapters on it that change nothing yet. Draws from torch's global generator.

    Raises:
        CoverageError: there is nothing to train.
    """
    model.requires_grad_(False)
    adapters = Adapters(model, find_moe_layers(model))
    if options.mode == "all":
        for layer in adapters.layers:
            _adapt_experts(adapters, layer, options)
    for layer in adapters.layers:
        router = router_module(layer)
        # a table of token ids decides, whatever the router says
        if router is None or chooses_by_token_table(layer):
            continue
        low_rank = LowRank(router.weight, options.router_rank, options.scaling)
        parametrize.register_parametrization(router, "weight", low_rank)
        adapters._router_modules.append(router)
        adapters.routers |= {f"{layer.name}.router.{name}": each for name, each in low_rank.named_parameters()}
    if not adapters.parameters:
        raise CoverageError(f"{type(model).__name__} has no router that mode='router' could train: use mode='all'")
    return adapters


def router_module(layer: MoELayer) -> Any:
    """The part of a router that holds its weight ``[E, H]``; ``None`` where it has no such weight."""
    for module in layer.router.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == layer.num_experts:
            return module
    return None


def _adapt_experts(adapters: Adapters, layer: MoELayer, options: RecoveryOptions) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options.expert_rank,
        lora_alpha=options.scaling * options.expert_rank,  # pyright: ignore[reportArgumentType] - any number will do
        use_dora=True,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    # where peft looks whether layers of bitsandbytes are among them
    experts: Any = layer.experts
    experts.is_loaded_in_4bit = getattr(adapters.model, "is_loaded_in_4bit", False)
    # into the experts, not the model, of which peft would take the experts for merged ones by its name
    inject_adapter_in_model(config, layer.experts, NAME)
    adapters.adapted.append(layer)
    for index, mlp in enumerate(layer.mlps):
        for projection, adapted in _adapted(mlp).items():
            for name, parameter in zip("abm", dora_parameters(adapted), strict=True):
                # peft makes them in the weight's dtype, in which small steps would be lost
                parameter.data = parameter.data.float()
                adapters.experts[f"{layer.name}.{index}.{projection}.{name}"] = parameter
            weight_BA = dense_weight(adapted.get_base_layer())
            dora_parameters(adapted)[2].data = weight_BA.detach().float().norm(dim=1)


def _adapted(mlp: ExpertMLP) -> dict[str, Any]:
    """Projections of an expert, in which peft's layers have taken the place of the linear ones."""
    return dict(projections(mlp))


def dora_parameters(adapted: Any) -> tuple[Parameter, Parameter, Parameter]:
    """``a [R, in]``, ``b [out, R]`` and ``m [out]``, the lengths of the rows of ``W + scaling * b @ a``."""
    return (
        adapted.lora_A[NAME].weight,
        adapted.lora_B[NAME].weight,
        adapted.lora_magnitude_vector[NAME].weight,
    )


def merged_weight(adapted: Any) -> Tensor:
    """What a projection multiplies by, in float32."""
    a_RA, b_BR, m_B = dora_parameters(adapted)
    direction_BA = dense_weight(adapted.get_base_layer()).float() + adapted.scaling[NAME] * (b_BR @ a_RA)
    return direction_BA * (m_B / row_norms(direction_BA))[:, None]


def _merged(adapted: Any) -> Linear:
    """The linear layer of a projection with its adapter in it, also where it was in 4 bits."""
    linear = adapted.get_base_layer()
    dtype = dense_weight(linear).dtype
    if type(linear) is not Linear:
        packed = linear
        with torch.device("meta"):
            linear = Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
        linear.bias = packed.bias
    linear.weight = Parameter(merged_weight(adapted).to(dtype))
    return linear


def row_norms(direction_BA: Tensor) -> Tensor:
    """Euclidean norms ``[..., B]`` of rows, a tiny number for rows of zeros, whose magnitude is zero too."""
    return direction_BA.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
