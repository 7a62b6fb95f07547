"""Cuts channels out of experts. Decides nothing: it is told which channels stay."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import initialize_module_for_quantization
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import pad

from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock, projections


class RemovedExpert(ExpertMLP):
    """Stands where an expert was removed, so that the others keep their numbers. Has no parameters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)

    def copy_from_experts_module(self, experts, index: int):
        raise NotImplementedError("a removed expert holds no weights")


def prune_block(block: ExpertBlock, kept_E: list[Tensor], padded_width: int | None = None) -> None:
    """Keep the given channels of every expert of a block, in place.

    Args:
        kept_E: for each expert the ascending channel indices that stay (int64); none: the expert is removed.
        padded_width: append zero channels up to this width; the outputs do not change.
    """
    for index, (mlp, kept_N) in enumerate(zip(block.mlps, kept_E, strict=True)):
        if kept_N.numel() == 0 and padded_width is None:
            remove_expert(block, index)
        else:
            prune_expert(mlp, kept_N, padded_width or kept_N.numel())


def remove_expert(block: ExpertBlock, index: int) -> None:
    """Replace expert ``index`` by a :class:`RemovedExpert`."""
    block.experts[index] = RemovedExpert()


@torch.no_grad()
def prune_expert(mlp: ExpertMLP, kept_N: Tensor, width: int) -> None:
    """Slice rows of ``gate_proj`` and ``up_proj`` (weights, biases) and columns of ``down_proj`` by one index.

    The bias of ``down_proj`` belongs to the output and stays.

    Args:
        kept_N: ascending channel indices, int64, all different.
        width: at least ``N``; further channels are zero.
    """
    assert bool((kept_N.diff() > 0).all()), "kept channels must ascend: gate, up and down share one order"
    for name, linear in projections(mlp).items():
        channel_dim = 1 if name == "down_proj" else 0
        _set_parameter(linear, "weight", _select(linear.weight, kept_N, channel_dim, width))
        if channel_dim == 0 and linear.bias is not None:
            _set_parameter(linear, "bias", _select(linear.bias, kept_N, 0, width))
        linear.out_features, linear.in_features = linear.weight.shape
        _renew_quantization(linear)
    mlp.intermediate_size = width  # pyright: ignore[reportArgumentType] - a plain attribute of its subclasses


def _select(tensor: Tensor, kept_N: Tensor, dim: int, width: int) -> Tensor:
    kept = tensor.detach().index_select(dim, kept_N.to(tensor.device))
    missing = width - kept_N.numel()
    # F.pad lists dimensions from the last to the first
    return pad(kept, (0, missing) if dim == tensor.ndim - 1 else (0, 0, 0, missing)).contiguous()


def _set_parameter(linear: Linear, name: str, value: Tensor) -> None:
    # assignment, because an offload cache accepts a new shape only as a new parameter
    setattr(linear, name, Parameter(value, requires_grad=getattr(linear, name).requires_grad))


def _renew_quantization(linear: Linear) -> None:
    # a quantizer later in the recipe has already sized its scales for the old width
    if getattr(linear, "quantization_scheme", None) is not None:
        initialize_module_for_quantization(linear)
