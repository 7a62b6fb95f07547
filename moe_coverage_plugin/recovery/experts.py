"""Computes the adapted experts of a layer all at once, whatever their widths.

The toolkit's container calls every expert by itself and peft every projection, so that a step would be spent on calls.
Here experts are padded with zeros to the widest one of their layer, in storage that their weights are views of, and
each projection is a few grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from moe_coverage_plugin.modeling.grouped_experts import replaced_forward
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears, expert_width, projections
from moe_coverage_plugin.modeling.routing import Routing
from moe_coverage_plugin.recovery.adapters import NAME, dora_parameters, row_norms

# grouped products want rows of whole 16 bytes
ALIGNMENT = 8


@contextmanager
def grouped_experts(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Let adapted layers compute all their experts at once; those that cannot keep the toolkit's loop.

    Adapters must stay where they are; weights are views of padded storage from then on.
    """
    with ExitStack() as stack:
        for layer in layers:
            if can_be_grouped(layer):
                stack.enter_context(replaced_forward(layer.experts, _Experts(layer).forward))
        yield


def can_be_grouped(layer: MoELayer) -> bool:
    """Whether the experts are gated ones in 16 bit without biases that compute as the toolkit's container does."""
    standard = type(layer.experts).forward is LinearExperts2D.forward
    gated = all("gate_proj" in projections(mlp) for mlp in layer.mlps if expert_width(mlp))
    linears = expert_linears(layer)
    weight = linears[0].weight
    # cards multiply groups in bfloat16 only
    fits = not weight.is_cuda or (weight.dtype == torch.bfloat16 and linears[0].in_features % ALIGNMENT == 0)
    whole = weight.is_floating_point() and not hasattr(weight, "quant_state")
    return standard and gated and whole and fits and all(linear.bias is None for linear in linears)


class _Experts:
    def __init__(self, layer: MoELayer):
        self.container: Any = layer.experts
        self.num_experts = layer.num_experts
        live = [index for index, mlp in enumerate(layer.mlps) if expert_width(mlp)]
        # None: all, which needs no indexing
        self.live = live if len(live) < layer.num_experts else None
        parts = [projections(layer.mlps[index]) for index in live]
        self.gate_up = [_Projection([part[name] for part in parts], ragged=0) for name in ("gate_proj", "up_proj")]
        self.down = _Projection([part["down_proj"] for part in parts], ragged=1)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = Routing.of(top_k_index, top_k_weights, self.num_experts, None)
        lengths_E = routing.lengths_E if self.live is None else routing.lengths_E[self.live]
        x_MH = hidden_states[routing.tokens_M]
        a_MI = self.container._apply_gate(torch.cat([each(x_MH, lengths_E) for each in self.gate_up], dim=-1))
        z_MH = self.down(a_MI, lengths_E)
        weighted_MH = (z_MH * routing.routing_weights_M[:, None]).to(hidden_states.dtype)
        # a sum over slots is the same every time, unlike atomic additions
        by_slot_MH = torch.zeros_like(weighted_MH).index_copy(0, routing.places_M, weighted_MH)
        return by_slot_MH.unflatten(0, (-1, hidden_states.shape[0])).sum(0)


class _Projection:
    """One adapted projection of every expert, each for its own rows, which follow one another.

    Outputs, or inputs, of narrower experts are zero beyond their width.
    """

    def __init__(self, adapted: list[Any], ragged: int):
        """
        Args:
            adapted: peft's layers.
            ragged: the dimension of the weights that is the expert's width.
        """
        self.adapted, self.ragged = adapted, ragged
        weights = [each.get_base_layer().weight for each in adapted]
        widths = [weight.shape[ragged] for weight in weights]
        self.widest = -(-max(widths) // ALIGNMENT) * ALIGNMENT
        shape = [weights[0].shape[0], weights[0].shape[1]]
        shape[ragged] = self.widest
        self.weight_EBA = weights[0].new_zeros(len(weights), *shape)
        for weight, stored_BA, width in zip(weights, self.weight_EBA, widths, strict=True):
            stored = stored_BA.narrow(ragged, 0, width)
            stored.copy_(weight)
            weight.data = stored
        rows = [expert * self.widest + torch.arange(width) for expert, width in enumerate(widths)]
        self.rows_C = torch.cat(rows).to(self.weight_EBA.device)

    def __call__(self, x_MA: Tensor, lengths_E: Tensor) -> Tensor:
        a_ERA, b_EBR, m_EB = self._adapters()
        # not every kernel writes the gradient of an expert without rows
        reached_E = (lengths_E > 0)[:, None, None]
        a_ERA, b_EBR = (torch.where(reached_E, each, torch.zeros_like(each)) for each in (a_ERA, b_EBR))
        scaling = self.adapted[0].scaling[NAME]
        with torch.no_grad():
            # DoRA (section 4.3) takes the norm for a constant
            norms_EB = row_norms(torch.baddbmm(self.weight_EBA.float(), b_EBR, a_ERA, alpha=scaling))
        scale_MB = (m_EB / norms_EB).to(x_MA.dtype).repeat_interleave(lengths_E, dim=0, output_size=len(x_MA))
        ends_E = lengths_E.cumsum(0, dtype=torch.int32)
        missing = -a_ERA.shape[1] % ALIGNMENT
        a_ERA, b_EBR = pad(a_ERA, (0, 0, 0, missing)).to(x_MA.dtype), pad(b_EBR, (0, missing)).to(x_MA.dtype)
        whole_MB = grouped_mm(x_MA, self.weight_EBA.transpose(1, 2), offs=ends_E)
        low_MR = grouped_mm(x_MA, a_ERA.transpose(1, 2), offs=ends_E)
        added_MB = grouped_mm(low_MR, b_EBR.transpose(1, 2), offs=ends_E)
        return scale_MB * torch.add(whole_MB, added_MB, alpha=scaling)

    def _adapters(self) -> tuple[Tensor, Tensor, Tensor]:
        a_, b_, m_ = zip(*(dora_parameters(each) for each in self.adapted), strict=True)
        if self.ragged == 0:
            return torch.stack(a_), self._padded(b_), self._padded(m_)
        return self._padded([a_RA.T for a_RA in a_]).transpose(1, 2), torch.stack(b_), torch.stack(m_)

    def _padded(self, parts: Sequence[Tensor]) -> Tensor:
        """``[E, widest, ...]`` from one tensor for each expert whose first axis is its width."""
        joined = torch.cat(list(parts))
        experts = len(self.adapted)
        zeros = joined.new_zeros(experts * self.widest, *joined.shape[1:])
        return zeros.index_copy(0, self.rows_C, joined).unflatten(0, (experts, self.widest))
