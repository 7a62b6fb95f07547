"""Kernels are compiled before they serve: the first of a kind takes Triton a second."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_coverage_plugin.serving.kernels.launch import ragged_experts, shared_memory
from moe_coverage_plugin.serving.kernels.routing import ONE_KERNEL
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED, LaunchPlan, all_plans
from moe_coverage_plugin.serving.kernels.weights import KernelWeights

_Kind = tuple[object, ...]
_compiled: set[_Kind] = set()


def compile_ahead(
    weights: KernelWeights, top_k: int, dtype: torch.dtype, activation: str, weight_on_input: bool
) -> bool:
    """Run every kernel that ``ragged_experts`` may choose for these experts, once for each kind of layer.

    Args:
        weights: of one layer; layers that differ by their widths only are of one kind, if these are multiples of the
            same unit.
        top_k: experts per token.
        dtype: of hidden states.
        activation, weight_on_input: as for ``ragged_experts``.

    Returns:
        Whether any kernel was run: not where the kind was known.
    """
    present = tuple(tensor is not None for tensor in weights.tensors)
    numbers = weights.experts, weights.hidden, weights.bits, weights.group_size, weights.unit, weights.min_width
    kind = (weights.table_E4.device, top_k, dtype, activation, weight_on_input, present, numbers)
    if kind in _compiled or weights.width == 0:
        return False
    for plan, tokens in runs(weights.bits, dtype.itemsize, top_k, shared_memory(weights.table_E4.device)):
        x_TH = torch.zeros(tokens, weights.hidden, dtype=dtype, device=weights.table_E4.device)
        ids_TK = torch.zeros(tokens, top_k, dtype=torch.int32, device=x_TH.device)
        ragged_experts(x_TH, ids_TK.float(), ids_TK, weights, activation, weight_on_input, plan)
    _compiled.add(kind)
    return True


def runs(bits: int, itemsize: int, top_k: int, shared: int = LARGE_SHARED) -> Iterator[tuple[LaunchPlan, int]]:
    """Plans, each with numbers of tokens that together need every kernel that it ever does."""
    within = [max(1, limit // top_k) for limit, _ in ONE_KERNEL]
    for plan in all_plans(bits, itemsize, shared):
        # what is decoded needs no tiles of pairs, so no sorting
        yield from ((plan, tokens) for tokens in ([1] if plan.path == "decode" else [*within, within[-1] + 1]))
