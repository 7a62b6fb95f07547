"""Slices the weights of experts to given channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import initialize_module_for_quantization
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import pad

from moe_coverage_plugin.modeling.memory import Range, drop_mapped_pages, mapped_ranges
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width, projections

# refitted weights of an expert's kept channels, by the names of projections: rows ``[N, H]``, or columns ``[H, N]``
FittedWeights = dict[str, Tensor]


class RemovedExpert(ExpertMLP):
    """Placeholder for a removed expert, so that the others keep their numbers. It has no parameters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(hidden_states)

    def copy_from_experts_module(self, experts, index: int):
        """Raise an error: there are no weights to copy to."""
        raise NotImplementedError("a removed expert has no weights")


def prune_layer(layer: MoELayer, kept_E: list[Tensor], padded_width: int | None = None) -> None:
    """Keep the given channels of every expert of a layer, in place (:func:`prune_experts`)."""
    assert len(kept_E) == layer.num_experts
    prune_experts(layer, dict(enumerate(kept_E)), padded_width)


def prune_experts(
    layer: MoELayer,
    kept: Mapping[int, Tensor],
    padded_width: int | None = None,
    fits: Mapping[int, FittedWeights] | None = None,
) -> None:
    """Keep the given channels of experts of a layer, in place.

    Args:
        layer: the layer.
        kept: by expert, the ascending indices of its kept channels (int64); empty: the expert is removed.
        padded_width: append zero channels up to this width and remove no expert; the outputs do not change.
        fits: by expert, weights that replace those of the kept channels.
    """
    mlps = layer.mlps
    ranges: list[Range] | None = None
    for index, kept_N in kept.items():
        mlp = mlps[index]
        with disable_onloading():
            unpruned = list(mlp.parameters())
        if kept_N.numel() == 0 and padded_width is None:
            remove_expert(layer, index)
        else:
            prune_expert(mlp, kept_N, padded_width or kept_N.numel(), (fits or {}).get(index))
        if any(each.device.type == "cpu" for each in unpruned):
            # the list of a process with a GPU takes milliseconds to read
            ranges = mapped_ranges() if ranges is None else ranges
            drop_mapped_pages(unpruned, ranges)


def remove_expert(layer: MoELayer, index: int) -> None:
    """Replace expert ``index`` by a :class:`RemovedExpert`."""
    layer.experts[index] = RemovedExpert()


@torch.no_grad()
def prune_expert(mlp: ExpertMLP, kept_N: Tensor, width: int, fit: FittedWeights | None = None) -> None:
    """Slice the rows of ``gate_proj`` and ``up_proj`` (weights, biases) and the columns of ``down_proj``, in place.

    The bias of ``down_proj`` belongs to the output and is unchanged.

    Args:
        mlp: the expert.
        kept_N: strictly ascending channel indices, int64.
        width: at least ``N``; the channels after the kept ones are zero.
        fit: weights that replace those of the kept channels.
    """
    assert bool((kept_N.diff() > 0).all()), "kept channels must ascend: the projections share one order"
    if kept_N.numel() == width == expert_width(mlp):
        # nothing to slice, and a copy would take memory if the weight is in a mapped file
        return
    for name, linear in projections(mlp).items():
        channel_dim = int(name == "down_proj")
        _slice(linear, "weight", kept_N, channel_dim, width, (fit or {}).get(name))
        if name != "down_proj":
            _slice(linear, "bias", kept_N, 0, width)
        with disable_onloading():
            linear.out_features, linear.in_features = linear.weight.shape
        _resize_scales(linear)
    mlp.intermediate_size = width  # pyright: ignore[reportArgumentType] - a plain attribute of its subclasses


def _slice(linear: Linear, name: str, kept_N: Tensor, dim: int, width: int, fitted: Tensor | None = None) -> None:
    # read once, because each read of an offloaded parameter copies it
    unpruned = getattr(linear, name)
    if unpruned is None:
        return
    kept = unpruned.detach().index_select(dim, kept_N.to(unpruned.device)) if fitted is None else fitted.to(unpruned)
    missing = width - kept_N.numel()
    # F.pad lists dimensions from the last to the first
    padded = pad(kept, (0, missing) if dim == unpruned.ndim - 1 else (0, 0, 0, missing)).contiguous()
    # assignment, because an offload cache accepts a new shape only as a new parameter
    setattr(linear, name, Parameter(padded, requires_grad=unpruned.requires_grad))


def _resize_scales(linear: Linear) -> None:
    # a quantizer later in the recipe has already created its scales for the old width
    if getattr(linear, "quantization_scheme", None) is not None:
        initialize_module_for_quantization(linear)
