"""Compilation of all kernels of a layer before it serves: Triton takes about a second for the first call of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_coverage_plugin.serving.kernels.launch import ragged_experts, shared_memory
from moe_coverage_plugin.serving.kernels.routing import ONE_KERNEL_LIMITS
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED_MEMORY, LaunchPlan, all_plans
from moe_coverage_plugin.serving.kernels.weights import KernelWeights
from moe_coverage_plugin.serving.ragged_weights import IDS_DTYPE, ROUTING_WEIGHT_DTYPE

_Kind = tuple[object, ...]
_compiled: set[_Kind] = set()


def compile_ahead(
    weights: KernelWeights, top_k: int, dtype: torch.dtype, activation: str, weight_on_input: bool
) -> bool:
    """Run every kernel that ``ragged_experts`` may choose for these experts, once for each kind of layer.

    Args:
        weights: of one layer. Layers that differ only in their widths are of one kind if they have the same ``unit``.
        top_k: experts per token.
        dtype: of hidden states.
        activation: as for ``ragged_experts``.
        weight_on_input: as for ``ragged_experts``.

    Returns:
        Whether any kernel was run; ``False`` if this kind of layer was compiled before.
    """
    present = tuple(tensor is not None for tensor in weights.tensors)
    numbers = weights.experts, weights.hidden, weights.bits, weights.group_size, weights.unit, weights.min_width
    kind = (weights.table_E4.device, top_k, dtype, activation, weight_on_input, present, numbers)
    if kind in _compiled or weights.max_width == 0:
        return False
    shared = shared_memory(weights.table_E4.device)
    for plan, tokens in plans_and_tokens(weights.bits, dtype.itemsize, top_k, shared):
        x_TH = torch.zeros(tokens, weights.hidden, dtype=dtype, device=weights.table_E4.device)
        ids_TK = torch.zeros(tokens, top_k, dtype=IDS_DTYPE, device=x_TH.device)
        routing_weight_TK = ids_TK.to(ROUTING_WEIGHT_DTYPE)
        ragged_experts(x_TH, routing_weight_TK, ids_TK, weights, activation, weight_on_input, plan)
    _compiled.add(kind)
    return True


def plans_and_tokens(
    bits: int, itemsize: int, top_k: int, shared: int = LARGE_SHARED_MEMORY
) -> Iterator[tuple[LaunchPlan, int]]:
    """Every plan, with numbers of tokens that together run all kernels that the plan can run.

    Args:
        bits: see ``KernelWeights``.
        itemsize: bytes of an element of the hidden states.
        top_k: experts per token.
        shared: bytes of shared memory that one program may have.
    """
    per_limit = [max(1, limit // top_k) for limit, _ in ONE_KERNEL_LIMITS]
    for plan in all_plans(bits, itemsize, shared):
        # decoding does not sort pairs, so all numbers of tokens run the same kernels
        yield from ((plan, tokens) for tokens in ([1] if plan.path == "decode" else [*per_limit, per_limit[-1] + 1]))
