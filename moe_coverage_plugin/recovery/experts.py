"""Lets a layer with adapters compute all its experts together, whatever their widths.

The toolkit's container calls every expert by itself and peft every projection, so that most of a training step would
be the overhead of these calls. Here the experts of a layer are padded with zeros to the widest one, in storage that
their weights are views of, and each projection is a few grouped matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from moe_coverage_plugin.modeling.grouped_experts import (
    ALIGNMENT,
    GroupedExperts,
    computes_as_toolkit,
    replaced_forward,
)
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears, expert_width, projections
from moe_coverage_plugin.recovery.adapters import NAME, dora_parameters, row_norms


@contextmanager
def grouped_experts(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Let adapted layers compute their experts together; layers that cannot keep the toolkit's loop.

    Weights are views of padded storage from then on, also after the context.

    Args:
        layers: their adapters must not move to another device inside the context.
    """
    with ExitStack() as stack:
        for layer in layers:
            if can_be_grouped(layer):
                stack.enter_context(replaced_forward(layer.experts, GroupedExperts(layer, AdaptedProjection).forward))
        yield


def can_be_grouped(layer: MoELayer) -> bool:
    """Whether all experts are gated, unquantized and without biases, and compute as the toolkit's container does."""
    gated = all("gate_proj" in projections(mlp) for mlp in layer.mlps if expert_width(mlp))
    linears = expert_linears(layer)
    weight = linears[0].weight
    # grouped products run on GPUs in bfloat16 only
    fits = not weight.is_cuda or (weight.dtype == torch.bfloat16 and linears[0].in_features % ALIGNMENT == 0)
    unquantized = weight.is_floating_point() and not hasattr(weight, "quant_state")
    no_biases = all(linear.bias is None for linear in linears)
    return computes_as_toolkit(layer) and gated and unquantized and fits and no_biases


class AdaptedProjection:
    """One adapted projection of every kept expert (see :data:`~.grouped_experts.Projection`).

    Outputs, or for ``down_proj`` inputs, of narrower experts are zero beyond their width.
    """

    def __init__(self, name: str, adapted: list[Any]):
        """Move the weights into padded storage.

        Args:
            name: of the projection.
            adapted: peft's layer of each expert.
        """
        self._adapted = adapted
        # the dimension of the weights that is the expert's width
        self._ragged = int(name == "down_proj")
        weights = [each.get_base_layer().weight for each in adapted]
        widths = [weight.shape[self._ragged] for weight in weights]
        self._widest = -(-max(widths) // ALIGNMENT) * ALIGNMENT
        shape = list(weights[0].shape)
        shape[self._ragged] = self._widest
        self._weight_EOA = weights[0].new_zeros(len(weights), *shape)
        for weight, stored_OA, width in zip(weights, self._weight_EOA, widths, strict=True):
            stored = stored_OA.narrow(self._ragged, 0, width)
            stored.copy_(weight)
            weight.data = stored
        rows = [expert * self._widest + torch.arange(width) for expert, width in enumerate(widths)]
        # the rows of the padded storage, all experts after one another, that are no padding
        self._rows_N = torch.cat(rows).to(self._weight_EOA.device)

    def __call__(self, x_MA: Tensor, lengths_E: Tensor) -> Tensor:
        """Multiply the rows of each expert by its weight with its DoRA adapter (section 4.3 of arXiv 2402.09353)."""
        a_ERA, b_EOR, m_EO = self._adapters()
        # not every kernel writes the gradient of an expert without rows
        reached_E = (lengths_E > 0)[:, None, None]
        a_ERA, b_EOR = (torch.where(reached_E, each, torch.zeros_like(each)) for each in (a_ERA, b_EOR))
        scaling = self._adapted[0].scaling[NAME]
        with torch.no_grad():
            # DoRA treats the norm as a constant
            norms_EO = row_norms(torch.baddbmm(self._weight_EOA.float(), b_EOR, a_ERA, alpha=scaling))
        scale_MO = (m_EO / norms_EO).to(x_MA.dtype).repeat_interleave(lengths_E, dim=0, output_size=len(x_MA))
        ends_E = lengths_E.cumsum(0, dtype=torch.int32)
        missing = -a_ERA.shape[1] % ALIGNMENT
        a_ERA, b_EOR = pad(a_ERA, (0, 0, 0, missing)).to(x_MA.dtype), pad(b_EOR, (0, missing)).to(x_MA.dtype)
        base_MO = grouped_mm(x_MA, self._weight_EOA.transpose(1, 2), offs=ends_E)
        low_MR = grouped_mm(x_MA, a_ERA.transpose(1, 2), offs=ends_E)
        added_MO = grouped_mm(low_MR, b_EOR.transpose(1, 2), offs=ends_E)
        return scale_MO * torch.add(base_MO, added_MO, alpha=scaling)

    def _adapters(self) -> tuple[Tensor, Tensor, Tensor]:
        a, b, m = zip(*(dora_parameters(each) for each in self._adapted), strict=True)
        if self._ragged == 0:
            return torch.stack(a), self._padded(b), self._padded(m)
        return self._padded([a_RA.T for a_RA in a]).transpose(1, 2), torch.stack(b), torch.stack(m)

    def _padded(self, parts: Sequence[Tensor]) -> Tensor:
        """``[E, widest, ...]`` from one tensor per expert whose first axis is its width."""
        joined = torch.cat(list(parts))
        experts = len(self._adapted)
        zeros = joined.new_zeros(experts * self._widest, *joined.shape[1:])
        return zeros.index_copy(0, self._rows_N, joined).unflatten(0, (experts, self._widest))
