"""Adapters that are trained and then merged: DoRA on every projection of every expert, a low-rank sum on routers."""

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

from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import (
    MoELayer,
    chooses_by_token_table,
    find_moe_layers,
    projections,
)
from moe_coverage_plugin.modeling.nf4 import dense_weight
from moe_coverage_plugin.options import RecoveryOptions

# name of the adapter in peft
NAME = "default"


class LowRank(Module):
    """A parametrization that adds ``scaling * b @ a`` to the weight ``[E, H]`` of a router; ``b`` starts at zero."""

    def __init__(self, weight_EH: Tensor, rank: int, scaling: float):
        super().__init__()
        experts, hidden = weight_EH.shape
        options = {"dtype": torch.float32, "device": weight_EH.device}
        self.a_RH = Parameter(torch.empty(rank, hidden, **options))
        self.b_ER = Parameter(torch.zeros(experts, rank, **options))
        torch.nn.init.kaiming_uniform_(self.a_RH, a=math.sqrt(5))
        self.scaling = scaling

    def forward(self, weight_EH: Tensor) -> Tensor:
        """Return the adapted weight in the dtype of the weight."""
        return (weight_EH.float() + self.scaling * (self.b_ER @ self.a_RH)).to(weight_EH.dtype)


@dataclass
class Adapters:
    """The adapters of a model.

    Attributes:
        model: the model, whose other parameters are frozen.
        layers: all MoE layers.
        adapted: MoE layers whose experts have adapters.
        experts: float32 parameters of the experts' adapters, by name, in the same order on every rank.
        routers: float32 parameters of the routers' adapters, by name, in the same order on every rank.
    """

    model: PreTrainedModel
    layers: list[MoELayer]
    adapted: list[MoELayer] = field(default_factory=list)
    experts: dict[str, Parameter] = field(default_factory=dict)
    routers: dict[str, Parameter] = field(default_factory=dict)
    _router_modules: list[Module] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of all adapters: experts first, then routers."""
        return self.experts | self.routers

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into the weights, in place, and restore the modules from before :func:`attach`."""
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
    """Check that peft is installed.

    Raises:
        CoverageError: it is not.
    """
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError as error:
        raise CoverageError(
            f"fine-tuning needs peft, which is not installed here: {how_to_install('finetune')}"
        ) from error


def attach(model: PreTrainedModel, options: RecoveryOptions) -> Adapters:
    """Freeze the model and add adapters, which change no output before they are trained.

    The first values are drawn from torch's global generator.

    Raises:
        CoverageError: the model has no router that can be trained, and the options exclude experts.
    """
    model.requires_grad_(False)
    adapters = Adapters(model, find_moe_layers(model))
    if options.mode == "all":
        for layer in adapters.layers:
            _adapt_experts(adapters, layer, options)
    for layer in adapters.layers:
        router = router_module(layer)
        # in some layers a table of token ids chooses the experts, not the router
        if router is None or chooses_by_token_table(layer):
            continue
        low_rank = LowRank(router.weight, options.router_rank, options.scaling)
        parametrize.register_parametrization(router, "weight", low_rank)
        adapters._router_modules.append(router)
        adapters.routers |= {f"{layer.name}.router.{name}": each for name, each in low_rank.named_parameters()}
    if not adapters.parameters:
        raise CoverageError(f"{type(model).__name__} has no router that mode='router' can train: use mode='all'")
    return adapters


def router_module(layer: MoELayer) -> Any:
    """Return the module inside a router that has the weight ``[E, H]``, or ``None`` if there is none."""
    for module in layer.router.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == layer.num_experts:
            return module
    return None


def _adapt_experts(adapters: Adapters, layer: MoELayer, options: RecoveryOptions) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options.expert_rank,
        lora_alpha=options.scaling * options.expert_rank,  # pyright: ignore[reportArgumentType] - floats work, too
        use_dora=True,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    # peft reads this attribute to find layers of bitsandbytes
    experts: Any = layer.experts
    experts.is_loaded_in_4bit = getattr(adapters.model, "is_loaded_in_4bit", False)
    # into the container of the experts: in the entire model, peft would expect fused experts for its model type
    inject_adapter_in_model(config, layer.experts, NAME)
    adapters.adapted.append(layer)
    for index, mlp in enumerate(layer.mlps):
        for projection, adapted in _adapted(mlp).items():
            for name, parameter in zip("abm", dora_parameters(adapted), strict=True):
                # peft creates them in the weight's dtype, where 16 bits would round small steps away
                parameter.data = parameter.data.float()
                adapters.experts[f"{layer.name}.{index}.{projection}.{name}"] = parameter
            weight_OA = dense_weight(adapted.get_base_layer())
            dora_parameters(adapted)[2].data = weight_OA.detach().float().norm(dim=1)


def _adapted(mlp: ExpertMLP) -> dict[str, Any]:
    """Return the projections of an expert, which are peft's layers after :func:`attach`."""
    return dict(projections(mlp))


def dora_parameters(adapted: Any) -> tuple[Parameter, Parameter, Parameter]:
    """Return the parameters of a DoRA adapter: ``a [R, A]``, ``b [O, R]`` and the magnitudes ``m [O]``.

    The adapted weight is ``m * V / ||V||`` by row, with ``V = W + scaling * b @ a`` (arXiv 2402.09353, equation 5).
    """
    return (
        adapted.lora_A[NAME].weight,
        adapted.lora_B[NAME].weight,
        adapted.lora_magnitude_vector[NAME].weight,
    )


def merged_weight(adapted: Any) -> Tensor:
    """Return the weight ``[O, A]`` of a projection with its adapter, in float32."""
    a_RA, b_OR, m_O = dora_parameters(adapted)
    direction_OA = dense_weight(adapted.get_base_layer()).float() + adapted.scaling[NAME] * (b_OR @ a_RA)
    return direction_OA * (m_O / row_norms(direction_OA))[:, None]


def _merged(adapted: Any) -> Linear:
    """Return a linear layer with the merged weight; a projection in 4 bits becomes one in 16 bits."""
    linear = adapted.get_base_layer()
    dtype = dense_weight(linear).dtype
    if type(linear) is not Linear:
        packed = linear
        with torch.device("meta"):
            linear = Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
        linear.bias = packed.bias
    linear.weight = Parameter(merged_weight(adapted).to(dtype))
    return linear


def row_norms(direction_OA: Tensor) -> Tensor:
    """Return the Euclidean norms ``[..., O]`` of rows, but never 0, because magnitudes are divided by them."""
    return direction_OA.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
