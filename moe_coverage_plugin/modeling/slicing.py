"""Cuts channels out of experts. Decides nothing: it is told which channels stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import initialize_module_for_quantization
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import pad

from moe_coverage_plugin.modeling.memory import drop_mapped_pages, mapped_ranges
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width, projections


class RemovedExpert(ExpertMLP):
    """Stands where an expert was removed, so that the others keep their numbers. Has no parameters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)

    def copy_from_experts_module(self, experts, index: int):
        raise NotImplementedError("a removed expert holds no weights")


def prune_layer(
    layer: MoELayer,
    kept_E: list[Tensor],
    padded_width: int | None = None,
    down_columns: Mapping[int, Tensor] | None = None,
) -> None:
    """Keep the given channels of every expert of a layer, in place.

    Args:
        kept_E: for each expert the ascending channel indices that stay (int64); none: the expert is removed.
        padded_width: append zero channels up to this width; the outputs do not change.
        down_columns: by expert, columns ``[H, N]`` that take the place of those of ``down_proj`` that stay.
    """
    ranges = mapped_ranges()
    for index, (mlp, kept_N) in enumerate(zip(layer.mlps, kept_E, strict=True)):
        with disable_onloading():
            whole = list(mlp.parameters())
        if kept_N.numel() == 0 and padded_width is None:
            remove_expert(layer, index)
        else:
            prune_expert(mlp, kept_N, padded_width or kept_N.numel(), (down_columns or {}).get(index))
        drop_mapped_pages(whole, ranges)


def remove_expert(layer: MoELayer, index: int) -> None:
    """Replace expert ``index`` by a :class:`RemovedExpert`."""
    layer.experts[index] = RemovedExpert()


@torch.no_grad()
def prune_expert(mlp: ExpertMLP, kept_N: Tensor, width: int, down_HN: Tensor | None = None) -> None:
    """Slice rows of ``gate_proj`` and ``up_proj`` (weights, biases) and columns of ``down_proj`` by one index.

    The bias of ``down_proj`` belongs to the output and stays.

    Args:
        kept_N: ascending channel indices, int64, all different.
        width: at least ``N``; further channels are zero.
        down_HN: columns in the place of those of ``down_proj`` that stay.
    """
    assert bool((kept_N.diff() > 0).all()), "kept channels must ascend: gate, up and down share one order"
    if kept_N.numel() == width == expert_width(mlp):
        # nothing to cut, and a copy would take memory: the weight may lie in a mapped file
        return
    for name, linear in projections(mlp).items():
        if name == "down_proj":
            _cut(linear, "weight", kept_N, 1, width, down_HN)
        else:
            _cut(linear, "weight", kept_N, 0, width)
            _cut(linear, "bias", kept_N, 0, width)
        with disable_onloading():
            linear.out_features, linear.in_features = linear.weight.shape
        _renew_quantization(linear)
    mlp.intermediate_size = width  # pyright: ignore[reportArgumentType] - a plain attribute of its subclasses


def _cut(linear: Linear, name: str, kept_N: Tensor, dim: int, width: int, instead: Tensor | None = None) -> None:
    # asked for once: an offloaded one is loaded each time
    whole = getattr(linear, name)
    if whole is None:
        return
    kept = whole.detach().index_select(dim, kept_N.to(whole.device)) if instead is None else instead
    missing = width - kept_N.numel()
    # F.pad lists dimensions from the last to the first
    cut = pad(kept, (0, missing) if dim == whole.ndim - 1 else (0, 0, 0, missing)).contiguous()
    # assignment, because an offload cache accepts a new shape only as a new parameter
    setattr(linear, name, Parameter(cut, requires_grad=whole.requires_grad))


def _renew_quantization(linear: Linear) -> None:
    # a quantizer later in the recipe has already sized its scales for the old width
    if getattr(linear, "quantization_scheme", None) is not None:
        initialize_module_for_quantization(linear)
