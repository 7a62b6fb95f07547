"""Finds the MoE layers of a model. Only this module depends on how model families name their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressed_tensors.utils import match_named_modules
from llmcompressor.modeling.moe.helpers import MoEConfig
from llmcompressor.modeling.moe.linear_experts import ExpertMLP, LinearExperts2D
from llmcompressor.modeling.moe.llama4 import Llama4LinearExperts
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.core.kept_experts import RouterNeeds
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.manifest import CoverageError

ROUTER_NAMES = ("gate", "router")
# keys of configs that size shared experts as a multiple of the width of a routed expert
SHARED_EXPERT_KEYS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")


@dataclass(frozen=True)
class MoELayer:
    """One mixture-of-experts layer.

    Attributes:
        name: module path of the experts, ``model.layers.0.mlp.experts``.
        moe: parent of ``experts`` and ``router``; its output ``y`` includes shared experts if the model has them.
        experts: the toolkit's container of linear experts.
        router: module that chooses experts for tokens.
        top_k: number of experts that the router chooses for a token.
    """

    name: str
    moe: Module
    experts: LinearExperts2D
    router: Module
    top_k: int

    @property
    def mlps(self) -> list[ExpertMLP]:
        """The experts in order, without the activation function, which the container also holds."""
        return [child for child in self.experts.children() if isinstance(child, ExpertMLP)]

    @property
    def num_experts(self) -> int:
        """Number of experts, removed ones included."""
        return len(self.mlps)

    @property
    def widths(self) -> list[int]:
        """Channels of each expert, 0 if it was removed."""
        return [expert_width(mlp) for mlp in self.mlps]


def expert_width(mlp: ExpertMLP) -> int:
    """Return the channels of an expert: the input features of its ``down_proj``, 0 for a removed expert."""
    down = getattr(mlp, "down_proj", None)
    return down.in_features if down is not None else 0


def shared_experts_follow(model: PreTrainedModel) -> bool:
    """Whether the config sizes shared experts by the width of routed ones, so that this width must not change."""
    config = model.config.get_text_config()
    return any(getattr(config, key, None) for key in SHARED_EXPERT_KEYS)


def projections(mlp: ExpertMLP) -> dict[str, Linear]:
    """Return the linear layers of an expert by name: ``gate_proj`` (if gated), ``up_proj``, ``down_proj``."""
    return {name: getattr(mlp, name) for name in PROJECTIONS if hasattr(mlp, name)}


def expert_linears(layer: MoELayer) -> list[Linear]:
    """Return all projections of all experts of a layer."""
    return [linear for mlp in layer.mlps for linear in projections(mlp).values()]


def find_moe_layers(model: PreTrainedModel, ignore: Sequence[str] = ()) -> list[MoELayer]:
    """Return all MoE layers of ``model`` in layer order, except those that ``ignore`` names.

    Args:
        model: with linearized experts, as ``oneshot`` prepares it.
        ignore: names, classes or ``re:`` patterns of experts modules (``model.layers.0.mlp.experts``), or of modules
            that contain them (``model.layers.0``).

    Raises:
        CoverageError: no experts, experts of an unsupported kind, an ignore entry that matches no MoE layer, or
            adapters of peft that are not merged.
    """
    check_merged(model)
    names = [name for name, module in model.named_modules() if isinstance(module, LinearExperts2D)]
    if not names:
        raise CoverageError(
            f"{type(model).__name__} has no mixture-of-experts layer in linear form: give the path of a "
            "mixture-of-experts model instead of the model, or open it within llm-compressor's load_quantizable_moe()"
        )
    ignored = _ignored(model, names, ignore)
    layers = [_layer(model, name) for name in names if name not in ignored]
    if not layers:
        raise CoverageError(f"ignore={list(ignore)} leaves none of {len(names)} MoE layers to prune: shorten it")
    return layers


def check_merged(model: Module) -> None:
    """Check that no layer is wrapped in an adapter of peft, whose weights would be left out.

    Raises:
        CoverageError: adapters are not merged.
    """
    adapted = [name for name, _ in model.named_modules() if name.endswith((".base_layer", ".original_module"))]
    if adapted:
        first = adapted[0].rpartition(".")[0]
        raise CoverageError(
            f"the model has adapters on {len(adapted)} layers ({first} is the first) "
            "that are not merged: go on with the model that merge_and_unload() of peft returns, or save the adapters "
            "alone by save_pretrained() of the PeftModel"
        )


def _ignored(model: Module, names: Sequence[str], ignore: Sequence[str]) -> set[str]:
    ignored: set[str] = set()
    for entry in ignore:
        matched = [name for name, _ in match_named_modules(model, [entry])]
        hit = {name for name in names if any(name == m or name.startswith(f"{m}.") for m in matched)}
        if not hit:
            raise CoverageError(
                f"ignore entry {entry!r} matches no MoE layer, the layers are {', '.join(names[:3])} ..."
            )
        ignored |= hit
    return ignored


def _layer(model: PreTrainedModel, name: str) -> MoELayer:
    parent = model.get_submodule(name.rpartition(".")[0])
    experts = model.get_submodule(name)
    assert isinstance(experts, LinearExperts2D)
    router = next(
        (getattr(parent, attr) for attr in ROUTER_NAMES if isinstance(getattr(parent, attr, None), Module)), None
    )
    if router is None or isinstance(experts, Llama4LinearExperts):
        raise CoverageError(
            f"{name} ({type(experts).__name__} in {type(parent).__name__}) is not called with the top-k routing of a "
            f"router beside it ({' or '.join(ROUTER_NAMES)}): this family is not supported"
        )
    return MoELayer(name, parent, experts, router, _top_k(model, router))


def _top_k(model: PreTrainedModel, router: Module) -> int:
    top_k = getattr(router, "top_k", None)
    return (
        top_k if isinstance(top_k, int) else MoEConfig.from_config(model.config.get_text_config()).num_experts_per_tok
    )


def uniform_shape(layers: Sequence[MoELayer]) -> tuple[int, int]:
    """Return the experts per layer and channels per expert, which all layers must share.

    Raises:
        CoverageError: layers differ, for instance because a model was pruned before.
    """
    shapes = {(layer.num_experts, *sorted(set(layer.widths))) for layer in layers}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2:
        raise CoverageError(
            "MoE layers differ in their numbers of experts or channels: scores of a model that was pruned before, "
            "or of layers of several shapes, cannot be compared; prune the original model, or list the differing "
            "layers in ignore"
        )
    return shape[0], shape[1]


def correction_biases(layer: MoELayer) -> list[tuple[Module, str]]:
    """Return the biases ``[..., E]`` that some routers add to scores before they choose; saved with the model.

    Each is returned as its module and its name there, because reading a tensor of an offloaded module may copy it.
    """
    return [
        (module, "e_score_correction_bias")
        for module in layer.moe.modules()
        if getattr(module, "e_score_correction_bias", None) is not None
    ]


def routing_groups(layer: MoELayer) -> tuple[int, int]:
    """Return the groups of a router's experts, and how many groups it chooses for a token; 1, 1 without groups."""
    names = ("num_group", "n_group")  # before and after a renaming in transformers
    groups = next((value for name in names if (value := getattr(layer.router, name, None))), 1)
    return groups, getattr(layer.router, "topk_group", None) or 1


def router_needs(layer: MoELayer) -> RouterNeeds:
    """Return the experts that the router of a layer cannot do without."""
    if chooses_by_token_table(layer):
        # a mask of logits cannot change its choice
        return RouterNeeds(1, layer.num_experts)
    groups, picked_groups = routing_groups(layer)
    # a group is scored by its best two experts, so a single kept expert would never be chosen
    return RouterNeeds(groups, max(-(-layer.top_k // picked_groups), 2 if groups > 1 else 1))


def chooses_by_token_table(layer: MoELayer) -> bool:
    """Whether a table of token ids chooses the experts (hash routing), independently of the router's logits."""
    return hasattr(layer.router, "tid2eid")


def linears_that_must_stay(layers: Sequence[MoELayer]) -> dict[Module, str]:
    """Return the modules that no quantizer may change, with their names: routers and the gates of shared experts."""
    found: dict[Module, str] = {}
    for layer in layers:
        parent_name = layer.name.rpartition(".")[0]
        for name, module in layer.moe.named_modules():
            inside_router = module is layer.router or any(module is child for child in layer.router.modules())
            one_output = isinstance(module, Linear) and module.out_features == 1
            if inside_router or one_output:
                found[module] = f"{parent_name}.{name}"
    return found
