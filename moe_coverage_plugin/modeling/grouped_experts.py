"""Computes the experts of a layer all at once and shows an observer every value inside them.

The toolkit runs experts one after the other, each over its tokens. They are many and small, so on a device the calls
cost more than the arithmetic, and hooks on every projection would cost as much again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import get_execution_device, get_offloaded_device
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import grouped_mm, linear

from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width, projections
from moe_coverage_plugin.modeling.routing import Routing


class ExpertTrace(NamedTuple):
    """The values inside a layer's experts for one batch, one row for every token and each of its experts.

    Attributes:
        x_MH: the experts' input.
        gate_MI: output of ``gate_proj``, ``None`` where experts have none.
        up_MI: output of ``up_proj``.
        a_MI: the activation, input of ``down_proj``.
        z_MH: the experts' output before the routing weight.
    """

    routing: Routing
    x_MH: Tensor
    gate_MI: Tensor | None
    up_MI: Tensor
    a_MI: Tensor
    z_MH: Tensor


# the mask ``[T]`` of the tokens of the batch in flight that are no padding, by their number; ``None``: all are real
RealTokens = Callable[[int], Tensor | None]


@contextmanager
def grouped_experts(
    layer: MoELayer, observe: Callable[[ExpertTrace], None] | None, real_tokens: RealTokens
) -> Iterator[None]:
    """Let ``layer`` compute routed tokens only, all experts at once, and show ``observe``, if any, what it computes.

    The experts that are not removed must have one width. Hooks on modules inside the experts do not run.
    """
    computed = _Experts(layer)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        real_T = real_tokens(hidden_states.shape[0])
        routing = Routing.of(top_k_index, top_k_weights, layer.num_experts, real_T)
        trace = computed.trace(hidden_states, routing)
        if observe is not None:
            observe(trace)
        weighted_MH = (trace.z_MH * routing.routing_weights_M[:, None]).to(hidden_states.dtype)
        # back into the order of slots and tokens: a sum over slots is the same every time, unlike atomic additions
        by_slot_MH = torch.zeros_like(weighted_MH).index_copy(0, routing.places_M, weighted_MH)
        return by_slot_MH.unflatten(0, (-1, hidden_states.shape[0])).sum(0)

    with replaced_forward(layer.experts, forward):
        yield


@contextmanager
def replaced_forward(module: Module, forward: Callable[..., object]) -> Iterator[None]:
    """Replace ``module.forward`` and restore it, so that copies of the module made later have their own."""
    # only an offloaded module has one beside that of its class
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class _Experts:
    """The experts of a layer that are not removed, projection by projection."""

    def __init__(self, layer: MoELayer):
        assert type(layer.experts).forward is LinearExperts2D.forward, "these experts compute their own way"
        self.container: Any = layer.experts
        live = [index for index, mlp in enumerate(layer.mlps) if expert_width(mlp)]
        # None: all, which needs no indexing
        self.live = live if len(live) < layer.num_experts else None
        parts = [projections(layer.mlps[index]) for index in live]
        self.projections = {name: _Projection([part[name] for part in parts]) for name in parts[0]}

    def trace(self, hidden_TH: Tensor, routing: Routing) -> ExpertTrace:
        """Compute the rows of a batch; none may belong to a removed expert."""
        lengths_E = routing.lengths_E if self.live is None else routing.lengths_E[self.live]
        x_MH = hidden_TH[routing.tokens_M]
        up_MI = self.projections["up_proj"](x_MH, lengths_E)
        if "gate_proj" in self.projections:
            gate_MI = self.projections["gate_proj"](x_MH, lengths_E)
            a_MI = self.container._apply_gate(torch.cat([gate_MI, up_MI], dim=-1))
        else:
            gate_MI = None
            a_MI = self.container.act_fn(up_MI)
        return ExpertTrace(routing, x_MH, gate_MI, up_MI, a_MI, self.projections["down_proj"](a_MI, lengths_E))


class _Projection:
    """One linear layer of every expert, each for its own rows, which follow one another."""

    def __init__(self, linears: list[Linear]):
        self.linears = linears
        # an offloaded weight is copied each time it is asked for, so only one that stays where it is may be held
        resident = all(get_offloaded_device(each) == get_execution_device(each) for each in linears)
        self._held = self._parameters() if resident else None

    def _parameters(self) -> tuple[list[Tensor], list[Tensor] | None]:
        weights = [each.weight for each in self.linears]
        return weights, None if self.linears[0].bias is None else [each.bias for each in self.linears]

    def __call__(self, x_MA: Tensor, lengths_E: Tensor) -> Tensor:
        weights, biases = self._held or self._parameters()
        if x_MA.is_cuda and x_MA.dtype == torch.bfloat16:
            ends_E = lengths_E.cumsum(0, dtype=torch.int32)
            y_MO = grouped_mm(x_MA, torch.stack(weights).transpose(1, 2), offs=ends_E)
            if biases is None:
                return y_MO
            return y_MO + torch.stack(biases).repeat_interleave(lengths_E, dim=0, output_size=len(y_MO))
        rows = zip(x_MA.split(lengths_E.tolist()), weights, biases or [None] * len(weights), strict=True)
        return torch.cat([linear(*row) for row in rows])
