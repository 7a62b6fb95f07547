"""Puts experts that a model holds as a list of MLPs, as remote code does, into the toolkit's expert container.

The toolkit linearizes fused experts, which are one tensor. Experts in a list are linear already, but their layer calls
them one by one and without gradient, so that the routing of tokens cannot be observed.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from llmcompressor.modeling.moe.linear_experts import ExpertMLPWithGate, LinearExperts2D
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import ROUTER_NAMES

EXPERTS_NAME = "experts"
SHARED_NAMES = ("shared_experts", "shared_expert")
PROBE_TOKENS = 8
# relative to the norm of the layer's output, which changes by about this with the order of the sum in bfloat16
LARGEST_DIFFERENCE = 0.02


class ListedExpert(ExpertMLPWithGate):
    """An expert of a list: its own linear layers, in the toolkit's class."""

    def __init__(self, mlp: Module, apply_gate: Any):
        """Take the linear layers of ``mlp``.

        Args:
            mlp: the expert of the list.
            apply_gate: the toolkit's function from the concatenated outputs of gate and up to the activation.
        """
        Module.__init__(self)
        for name in PROJECTIONS:
            setattr(self, name, getattr(mlp, name))
        self.intermediate_size = self.down_proj.in_features
        self._apply_gate = apply_gate


class ListedExperts(LinearExperts2D):
    """The experts of a list, called together with their routing: ``(x [T, H], ids [T, K], weights [T, K])``."""

    is_concatenated, is_transposed, has_bias, has_gate = True, False, False, True
    _apply_gate = _default_apply_gate  # pyright: ignore[reportAssignmentType] - declared without self
    # pickle looks up the method of an expert by the name of its function
    _default_apply_gate = _default_apply_gate

    def __init__(self, mlps: ModuleList):
        """Take the experts of the list ``mlps``."""
        ModuleList.__init__(self, [ListedExpert(mlp, self._apply_gate) for mlp in mlps])
        first: Any = mlps[0]
        self.num_experts = len(mlps)
        self.intermediate_size = first.down_proj.in_features
        # after the experts, as in the toolkit
        self.act_fn = first.act_fn
        self.alpha = self.limit = self.swiglu_limit = None


class ListedMoE(Module):
    """Router, experts of a list, and shared experts under their own names: ``y = sum of experts + shared(x)``.

    In training it adds no auxiliary loss that balances experts.
    """

    def __init__(self, moe: Module, experts: ListedExperts, router: str, shared: str | None):
        """Take the children of ``moe`` with other experts.

        Args:
            moe: the layer.
            experts: replaces the list.
            router: name of the router in ``moe``.
            shared: name of the shared experts; ``None``: there are none.
        """
        super().__init__()
        for name, child in moe.named_children():
            setattr(self, name, experts if name == EXPERTS_NAME else child)
        self._router, self._shared = router, shared
        self.train(moe.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the layer; ``[B, S, H]`` to ``[B, S, H]``."""
        ids, weights = _routing(self.get_submodule(self._router)(hidden_states))
        routed = self.get_submodule(EXPERTS_NAME)(
            hidden_states.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2)
        )
        y = routed.view_as(hidden_states)
        return y if self._shared is None else y + self.get_submodule(self._shared)(hidden_states)


def linearize_expert_lists(model: PreTrainedModel) -> None:
    """Put every list of gated experts beside a router into the toolkit's container, in place.

    Parameters keep their names and values. Unless it is on the meta device, each layer is run before and after.

    Raises:
        CoverageError: a layer consists of more than a router, experts and shared experts, or its output changes.
    """
    for name, moe in list(model.named_modules()):
        mlps = getattr(moe, EXPERTS_NAME, None)
        if not _is_expert_list(mlps):
            continue
        router, shared = _child(moe, ROUTER_NAMES), _child(moe, SHARED_NAMES)
        odd = [child for child, _ in moe.named_children() if child not in (EXPERTS_NAME, router, shared)]
        odd += [parameter for parameter, _ in moe.named_parameters(recurse=False)]
        if odd or router is None:
            raise CoverageError(
                f"{name} ({type(moe).__name__}) has its experts in a list beside {', '.join(odd) or 'no router'}: "
                f"only layers of a router ({' or '.join(ROUTER_NAMES)}), experts and shared experts "
                f"({' or '.join(SHARED_NAMES)}) are supported"
            )
        first: Any = mlps[0]
        listed = ListedMoE(moe, ListedExperts(mlps), router, shared)
        _check_output(name, moe, listed, first.up_proj.in_features)
        # patch: expert-lists
        model.set_submodule(name, listed)


def _is_expert_list(module: object) -> TypeGuard[ModuleList]:
    if not isinstance(module, ModuleList) or isinstance(module, LinearExperts2D) or len(module) < 2:
        return False
    linears = [getattr(mlp, name, None) for mlp in module for name in PROJECTIONS]
    plain = all(isinstance(linear, Linear) and linear.bias is None for linear in linears)
    return plain and isinstance(getattr(module[0], "act_fn", None), Module)


def _child(moe: Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(moe, name, None), Module)), None)


def _routing(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Expert ids and routing weights from a router's output, which has them in either order; a loss may follow."""
    first, second = output[:2]
    return (second, first) if first.is_floating_point() else (first, second)


@torch.no_grad()
def _check_output(name: str, moe: Module, listed: ListedMoE, hidden_size: int) -> None:
    weight = next(moe.parameters())
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, PROBE_TOKENS, hidden_size, generator=generator).to(weight)
    before, after = moe(x), listed(x)
    if not isinstance(before, Tensor) or not (after - before).norm() <= LARGEST_DIFFERENCE * before.norm():
        raise CoverageError(
            f"{name} ({type(moe).__name__}) has its experts in a list, and its output is not the sum of the experts "
            "that its router chooses and of its shared experts: this family is not supported"
        )
