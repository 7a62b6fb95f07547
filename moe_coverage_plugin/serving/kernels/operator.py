"""The kernels as one torch operator, which compilers and CUDA graphs treat as a unit."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_coverage_plugin.serving.kernels.launch import ragged_experts
from moe_coverage_plugin.serving.kernels.weights import KernelWeights
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights


def run_kernels(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: KernelWeights,
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    """Call ``ragged_experts`` through the operator; arguments and result are the same."""
    return torch.ops.moe_coverage.ragged_moe_kernels(
        *(x_TH, topk_weights_TK, topk_ids_TK, *schema_arguments(weights), activation, weight_on_input)
    )


def schema_arguments(weights: KernelWeights) -> tuple[Tensor | int | None, ...]:
    """The fields of ``weights`` as the operator takes them: its schema allows neither classes nor tuples of these."""
    numbers = weights.hidden, weights.max_width, weights.bits, weights.group_size, weights.unit
    return *weights.tensors, weights.table_E4, *numbers


def _ragged_moe_kernels(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    w13_zero_point: Tensor | None,
    w2_zero_point: Tensor | None,
    table_E4: Tensor,
    hidden: int,
    max_width: int,
    bits: int,
    group_size: int,
    unit: int,
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    """The operator's implementation; its signature is the schema, with the arguments of ``schema_arguments``."""
    tensors = RaggedWeights(w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, w13_zero_point, w2_zero_point)
    weights = KernelWeights(tensors, table_E4, hidden, max_width, bits, group_size, unit)
    return ragged_experts(x_TH, topk_weights_TK, topk_ids_TK, weights, activation, weight_on_input)


def _fake(x_TH: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TH)


# not torch.library.custom_op, whose checks at every call take longer than some of the kernels
_LIBRARY = torch.library.Library("moe_coverage", "FRAGMENT")
_LIBRARY.define("ragged_moe_kernels" + torch.library.infer_schema(_ragged_moe_kernels, mutates_args=()))
_LIBRARY.impl("ragged_moe_kernels", _ragged_moe_kernels, "CompositeExplicitAutograd")
torch.library.register_fake("moe_coverage::ragged_moe_kernels", _fake, lib=_LIBRARY)
