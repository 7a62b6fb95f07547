"""The forward pass of experts of unequal width in plain torch: right on every device, first; the kernels' measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.serving import float8
from moe_coverage_plugin.serving.packing import dequantize, unpack_zero_points
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights
from moe_coverage_plugin.serving.storage import ZERO_POINT, ExpertShapes, Part

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def ragged_moe(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: RaggedWeights,
    widths_E: list[int],
    group_size: int,
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    """Sum over a token's experts of routing weight times ``down(act(gate(x)) * up(x))``, for this rank's channels.

    One operator, so that compilers need not look into a loop that depends on the routing.

    Args:
        x_TH: hidden states.
        topk_weights_TK: routing weights, usually float32.
        topk_ids_TK: integer expert numbers. An expert of width 0 adds nothing, nor does a number that no expert has,
            such as -1, vLLM's mark of padding.
        weights: in the layout of ``ExpertShapes``: plain in the dtype of ``x_TH``, 8-bit floats, to which activations
            are then rounded, too, or int32 words.
        widths_E: channels of each expert on this rank.
        group_size: input features per scale, 0 for one scale per row.
        activation: a key of ``ACTIVATIONS``.
        weight_on_input: multiply the routing weight into the expert's input instead of its output.

    Returns:
        ``y_TH`` in the dtype of ``x_TH``, accumulated in float32.
    """
    options = widths_E, group_size, activation, weight_on_input
    return ragged_moe_operator(x_TH, topk_weights_TK, topk_ids_TK, *weights, *options)


@torch.library.custom_op("moe_coverage::ragged_moe", mutates_args=())
def ragged_moe_operator(
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
    widths_E: list[int],
    group_size: int,
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    """``ragged_moe`` with the fields of ``RaggedWeights`` one by one: the signature is the operator's schema."""
    weights = RaggedWeights(w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, w13_zero_point, w2_zero_point)
    bits = {torch.int32: 4, float8.FLOAT8: 8}.get(w13.dtype, 16)
    scheme = ExpertScheme(bits, group_size or None, w13_zero_point is not None)
    shapes = ExpertShapes(tuple(widths_E), x_TH.shape[-1], scheme)
    known = not (x_TH.is_cuda and torch.cuda.is_current_stream_capturing())
    act_fn = ACTIVATIONS[activation]
    return routed_experts(x_TH, topk_weights_TK, topk_ids_TK, weights, shapes, act_fn, weight_on_input, known)


@ragged_moe_operator.register_fake
def _(x_TH: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TH)


def routed_experts(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: RaggedWeights,
    shapes: ExpertShapes,
    act_fn: Callable[[Tensor], Tensor],
    weight_on_input: bool,
    routing_known: bool,
) -> Tensor:
    """The loop over experts behind ``ragged_moe``.

    While a graph is captured the routing is not known: every expert sees every token, and what was not routed is
    dropped.
    """
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in topk_ids_TK.unique().tolist() if routing_known else range(len(shapes.widths_E)):
        if not 0 <= expert < len(shapes.widths_E) or (shapes.widths_E[expert] == 0 and weights.w2_bias is None):
            continue
        hit_TK = topk_ids_TK == expert
        hit_T = hit_TK.any(-1)
        # routing weights of padding may be NaN
        weight_T = topk_weights_TK.where(hit_TK, 0).sum(-1)
        token_M = hit_T.nonzero().squeeze(-1) if routing_known else torch.arange(len(x_TH), device=x_TH.device)
        x_NH, weight_N1 = x_TH[token_M], weight_T[token_M].unsqueeze(-1)
        if weight_on_input:
            z_MH = _expert_forward((x_NH * weight_N1).to(x_TH.dtype), weights, shapes, expert, act_fn).float()
        else:
            z_MH = _expert_forward(x_NH, weights, shapes, expert, act_fn).float() * weight_N1
        y_TH.index_add_(0, token_M, z_MH.masked_fill(~hit_T[token_M].unsqueeze(-1), 0))
    return y_TH.to(x_TH.dtype)


def _expert_forward(
    x_NH: Tensor, weights: RaggedWeights, shapes: ExpertShapes, expert: int, act_fn: Callable[[Tensor], Tensor]
) -> Tensor:
    gate_up = _linear(x_NH, weights, "w13", shapes, expert)
    gate, up = gate_up.split(shapes.widths_E[expert], dim=-1) if shapes.widths_E[expert] else (gate_up, gate_up)
    return _linear(act_fn(gate) * up, weights, "w2", shapes, expert)


def _linear(x: Tensor, weights: RaggedWeights, part: Part, shapes: ExpertShapes, expert: int) -> Tensor:
    bias = getattr(weights, f"{part}_bias")
    bias = None if bias is None else shapes.matrix(bias, part, "bias", expert).squeeze(-1)
    if shapes.scheme.bits != 8:
        return F.linear(x, _weight(weights, part, shapes, expert, x.shape[-1]), bias)
    scale = shapes.matrix(getattr(weights, f"{part}_scale"), part, "weight_scale", expert)
    return float8.linear(x, shapes.matrix(getattr(weights, part), part, "weight", expert), scale, bias)


def _weight(weights: RaggedWeights, part: Part, shapes: ExpertShapes, expert: int, columns: int) -> Tensor:
    flat, scale, zero_point = (getattr(weights, f"{part}{kind}") for kind in ("", "_scale", "_zero_point"))
    if scale is None:
        return shapes.matrix(flat, part, "weight", expert)
    packed = shapes.matrix(flat, part, "weight_packed", expert)
    scale = shapes.matrix(scale, part, "weight_scale", expert)
    if zero_point is not None:
        words = shapes.matrix(zero_point, part, ZERO_POINT, expert)
        zero_point = unpack_zero_points(words, len(packed), 2 if part == "w13" else 1)
    return dequantize(packed, scale, columns, zero_point)
