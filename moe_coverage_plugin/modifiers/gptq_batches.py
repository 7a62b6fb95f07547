"""GPTQ of weights of one shape: the toolkit's arithmetic, with one factorization of all Hessian matrices together.

The toolkit factorizes each Hessian matrix, inverts it and factorizes the inverse. On a GPU it inverts one matrix after
the other, which takes longer than all other parts of GPTQ together if the matrices are many.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import disable_offloading
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs, QuantizationStrategy
from llmcompressor.modifiers.gptq.gptq_quantize import gptq_block_update
from llmcompressor.modifiers.gptq.helpers import (
    GPTQ_PRECISION,
    apply_activation_ordering,
    prepare_batch,
    update_batch_qparams,
)
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.core.factors import inverse_factor
from moe_coverage_plugin.modifiers.shared_inputs import found_qparams


class Scales(NamedTuple):
    """Scales and zero points of weights, ``[E, ...]``, by the names that the toolkit's functions use."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


class QuantizedWeights(NamedTuple):
    """What GPTQ has made of weights.

    Attributes:
        weight_EOA: on the grid, in the dtype of the weights.
        loss_E: error of the outputs.
        nearest_E: bool, rounded to nearest, because the Hessian matrix is not positive definite.
    """

    weight_EOA: Tensor
    loss_E: Tensor
    nearest_E: Tensor


@torch.no_grad()
def quantize_modules(
    modules: list[Any],
    hessians: dict[Module, Tensor],
    samples: dict[Module, Tensor],
    block_size: int,
    dampening: float,
) -> tuple[list[float], list[bool]]:
    """Quantize modules of one shape and scheme, whose observers have seen their weights.

    Args:
        modules: a batch of the toolkit's ``assign_batches``.
        hessians: by module; those of the batch are removed.
        samples: by module, what its Hessian matrix is divided by; those of the batch are removed.
        block_size: columns whose errors are passed on together.
        dampening: of each Hessian matrix, relative to the mean of its diagonal.

    Returns:
        ``loss_E`` and ``nearest_E`` of :class:`QuantizedWeights`, read from the device at once.
    """
    arguments = modules[0].quantization_scheme.weights
    found: Any = found_qparams(modules)
    with disable_offloading():
        prepared: Any = prepare_batch(modules, found, hessians, samples)
        weights_EOA, hessians_EAA, *scales = prepared
        result = quantize_weights(weights_EOA, hessians_EAA, Scales(*scales), arguments, block_size, dampening)
        update_batch_qparams(modules, result.weight_EOA, *scales, quant_args=arguments)
    return result.loss_E.tolist(), result.nearest_E.tolist()


@torch.no_grad()
def quantize_weights(
    weight_EOA: Tensor,
    hessian_EAA: Tensor,
    scales: Scales,
    arguments: QuantizationArgs,
    block_size: int,
    dampening: float,
) -> QuantizedWeights:
    """Quantize weights of one shape; the counterpart of the toolkit's ``quantize_weight``.

    Args:
        weight_EOA: float32 weights are changed.
        hessian_EAA: changed if they are float32.
        scales: of the weights.
        arguments: of the scheme.
        block_size: columns whose errors are passed on together.
        dampening: of each Hessian matrix, relative to the mean of its diagonal.
    """
    dtype, columns = weight_EOA.dtype, weight_EOA.shape[-1]
    weight_EOA, hessian_EAA = weight_EOA.to(GPTQ_PRECISION), hessian_EAA.to(GPTQ_PRECISION)
    if scales.scale.dtype == torch.float64:
        # the toolkit's kernel for GPUs takes no wider dtype
        scales = scales._replace(scale=scales.scale.to(GPTQ_PRECISION))
    ordering: Any = arguments.actorder
    weight_EOA, hessian_EAA, order_EA = apply_activation_ordering(weight_EOA, hessian_EAA, ordering)
    inverse_EAA, nearest_E = _damped_factor(weight_EOA, hessian_EAA, dampening)
    del hessian_EAA
    loss_E = weight_EOA.new_zeros(len(weight_EOA))
    for first in range(0, columns, block_size):
        last = min(first + block_size, columns)
        block_EOB = weight_EOA[:, :, first:last].clone()
        rounded_EOB, error_EOB, losses_EOB = (torch.zeros_like(block_EOB) for _ in range(3))
        gptq_block_update(
            block_EOB,
            inverse_EAA[:, first:last, first:last],
            rounded_EOB,
            error_EOB,
            losses_EOB,
            **scales._asdict(),
            g_idx=_groups(arguments, columns, order_EA, weight_EOA.device),
            quant_args=arguments,
            i1=first,
        )
        weight_EOA[:, :, first:last] = rounded_EOB
        weight_EOA[:, :, last:] -= error_EOB @ inverse_EAA[:, first:last, last:]
        loss_E += losses_EOB.sum((1, 2)) / 2
    if order_EA is not None:
        weight_EOA = weight_EOA.gather(-1, order_EA.argsort(-1)[:, None].expand_as(weight_EOA))
    return QuantizedWeights(weight_EOA.to(dtype), loss_E, nearest_E)


def _damped_factor(weight_EOA: Tensor, hessian_EAA: Tensor, dampening: float) -> tuple[Tensor, Tensor]:
    """The factors by which errors are passed on, and which of them are identities because there is no factor.

    Columns of weights without any input become zero, as in the toolkit.
    """
    diagonal_EA = hessian_EAA.diagonal(dim1=-2, dim2=-1)
    unused_EA = diagonal_EA == 0
    diagonal_EA.masked_fill_(unused_EA, 1.0)
    weight_EOA.masked_fill_(unused_EA[:, None], 0.0)
    diagonal_EA += dampening * diagonal_EA.mean(-1, keepdim=True)
    inverse_EAA, solved_E = inverse_factor(hessian_EAA)
    identity_AA = torch.eye(inverse_EAA.shape[-1], dtype=inverse_EAA.dtype, device=inverse_EAA.device)
    torch.where(solved_E[:, None, None], inverse_EAA, identity_AA, out=inverse_EAA)
    return inverse_EAA, ~solved_E


def _groups(arguments: QuantizationArgs, columns: int, order_EA: Tensor | None, device: torch.device) -> Tensor | None:
    """The group of each column, ``[A]`` or ``[E, A]``; ``None`` if columns have no groups."""
    if arguments.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        assert arguments.group_size is not None
        size = arguments.group_size
    elif arguments.strategy == QuantizationStrategy.BLOCK:
        assert arguments.block_structure is not None
        size = arguments.block_structure[1]
    else:
        return None
    groups_A = torch.arange(columns, dtype=torch.int, device=device) // size
    # "==", because "static" is the same as "weight", but "!=" does not see that
    if order_EA is not None and arguments.actorder == ActivationOrdering.WEIGHT:
        return groups_A.expand_as(order_EA).gather(1, order_EA)
    return groups_A
