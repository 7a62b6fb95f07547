"""Layers of random weights: ours, and vLLM's from the same flat tensors.

vLLM and Triton are imported inside functions, because rows are rendered and tested without them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.shapes import GROUP_SIZE, Shape
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights


class Call(NamedTuple):
    """Arguments of a layer: bfloat16 hidden states, float32 routing weights, int32 experts."""

    x_TH: Tensor
    topk_weights_TK: Tensor
    topk_ids_TK: Tensor


@dataclass(frozen=True)
class Layer:
    """A function that runs a layer, and copies of the layer's weights.

    Attributes:
        run: called with one of the copies.
        copies: copies made so far.
    """

    run: Callable[[Any, Call], Tensor]
    copies: list[Any]

    def copied(self, count: int) -> list[Any]:
        """Return ``count`` copies of the weights."""
        while len(self.copies) < count:
            self.copies.append(copy.deepcopy(self.copies[0]))
        return self.copies[:count]


def draw(shape: Shape, tokens: int, generator: torch.Generator) -> Call:
    """Random hidden states, and the experts of a random router with renormalized routing weights."""
    common = {"device": generator.device, "generator": generator}
    x_TH = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **common)
    top = torch.randn(tokens, shape.experts, **common).softmax(-1).topk(shape.top_k)
    return Call(x_TH, top.values / top.values.sum(-1, keepdim=True), top.indices.int())


def random_tensors(widths_E: Sequence[int], hidden: int, bits: int, generator: torch.Generator) -> RaggedWeights:
    """Weights and, for 4 and 8 bits, their scales."""
    values = sum(widths_E) * hidden
    common = {"device": generator.device, "generator": generator}
    if bits == 16:
        return RaggedWeights(
            *(torch.randn(n, dtype=torch.bfloat16, **common).mul_(0.02) for n in (2 * values, values))
        )
    if bits == 8:
        weights = [torch.randn(n, dtype=torch.bfloat16, **common) for n in (2 * values, values)]
        rows = 2 * sum(widths_E), hidden * sum(width > 0 for width in widths_E)
        scales = [torch.rand(n, dtype=torch.bfloat16, **common).mul_(4e-4) for n in rows]
        weights = [weight.mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn) for weight in weights]
        return RaggedWeights(*weights, *scales)
    words = [torch.randint(-(2**31), 2**31 - 1, (n // 8,), dtype=torch.int32, **common) for n in (2 * values, values)]
    sizes = (2 * values // GROUP_SIZE, values // GROUP_SIZE)
    scales = [torch.rand(n, dtype=torch.bfloat16, **common).mul_(0.01) for n in sizes]
    return RaggedWeights(*words, *scales)


def ours(tensors: RaggedWeights, widths_E: Sequence[int], hidden: int) -> Layer:
    """Our layer. Packed tensors are overwritten."""
    from moe_coverage_plugin.serving.kernels import prepare, run_kernels

    def run(weights: Any, call: Call) -> Tensor:
        return run_kernels(*call, weights, "silu", False)

    group_size = GROUP_SIZE if tensors.w13.dtype == torch.int32 else None
    return Layer(run, [prepare(tensors, widths_E=widths_E, hidden=hidden, group_size=group_size)])


def stock(tensors: RaggedWeights, shape: Shape) -> dict[str, Layer]:
    """Layers of vLLM with experts of one width, by kernel and choice of tiles. Tensors are not changed."""
    if tensors.w13.dtype == torch.int32:
        return {"Marlin": _marlin(tensors, shape)}
    of_8_bits = {"CUTLASS": _cutlass(tensors, shape)} if tensors.w13.dtype == torch.float8_e4m3fn else {}
    return of_8_bits | _triton(tensors, shape)


def _triton(tensors: RaggedWeights, shape: Shape) -> dict[str, Layer]:
    """Triton kernels of vLLM with its own choice of tiles.

    If vLLM has tuned tiles for the unpruned width but not for this one, there is a second layer with these tiles.
    """
    from vllm.model_executor.layers.fused_moe import fused_experts, override_config
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    experts, width = shape.experts, shape.width
    is_8_bits = tensors.w13_scale is not None
    tuned_for = "fp8_w8a8" if is_8_bits else None

    def with_table(table: dict[int, Any] | None) -> Callable[[Any, Call], Tensor]:
        def run(weights: tuple[Tensor, ...], call: Call) -> Tensor:
            quant_config = None
            if is_8_bits:
                quant_config = fp8_w8a8_moe_quant_config(*weights[2:], per_act_token_quant=True, per_out_ch_quant=True)
            routing = call.topk_weights_TK, call.topk_ids_TK
            tokens = len(call.x_TH)
            # None is vLLM's own choice; it is set explicitly because a failed call does not reset the table
            config = table[min(table, key=lambda size: abs(size - tokens))] if table else None
            with override_config(config):
                return fused_experts(call.x_TH, *weights[:2], *routing, quant_config=quant_config)

        return run

    copies = [_of_one_width(tensors, shape)]
    layers = {"own choice": Layer(with_table(None), copies)}
    unpruned = get_moe_configs(experts, shape.channels, tuned_for)
    if unpruned and not get_moe_configs(experts, width, tuned_for):
        layers[f"tuned for {shape.channels} channels"] = Layer(with_table(unpruned), copies)
    return layers


def _cutlass(tensors: RaggedWeights, shape: Shape) -> Layer:
    """CUTLASS's grouped matrix products of 8-bit floats, which vLLM prefers, with all steps around them."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import run_cutlass_moe_fp8

    experts, width, hidden = shape.experts, shape.width, shape.hidden
    ones_E = torch.ones(experts, dtype=torch.int64, device=tensors.w13.device)
    hidden_strides, down_strides, gate_up_strides = hidden * ones_E, width * ones_E, 2 * width * ones_E

    def run(weights: tuple[Tensor, ...], call: Call) -> Tensor:
        w1, w2, w1_scale, w2_scale = weights
        x_TH, scale_T1 = ops.scaled_fp8_quant(call.x_TH, None, use_per_token_if_dynamic=True)
        y_TH, pairs = torch.empty_like(call.x_TH), call.topk_ids_TK.numel()
        run_cutlass_moe_fp8(
            *(y_TH, x_TH, w1, w2, call.topk_ids_TK, MoEActivation.SILU, experts, None),
            *(w1_scale, w2_scale, scale_T1, None, hidden_strides, down_strides, gate_up_strides, hidden_strides),
            workspace13=y_TH.new_empty(pairs, max(2 * width, hidden)),
            workspace2=y_TH.new_empty(pairs, max(width, hidden)),
            expert_num_tokens=None,
            out_dtype=y_TH.dtype,
            per_act_token=True,
            per_out_ch=True,
            use_batched_format=False,
            topk_weights=call.topk_weights_TK,
            permute_scratch=None,
        )
        return y_TH

    return Layer(run, [_of_one_width(tensors, shape)])


def _of_one_width(tensors: RaggedWeights, shape: Shape) -> tuple[Tensor, ...]:
    """Weights of 16 bits, or of 8 bits and their scales, in vLLM's shapes."""
    experts, width, hidden = shape.experts, shape.width, shape.hidden
    weights = tensors.w13.view(experts, 2 * width, hidden), tensors.w2.view(experts, hidden, width)
    scales = (scale for scale in (tensors.w13_scale, tensors.w2_scale) if scale is not None)
    return *weights, *(scale.float().view(experts, -1, 1) for scale in scales)


def _marlin(tensors: RaggedWeights, shape: Shape) -> Layer:
    """Marlin as the engine calls it, with weights repacked by vLLM's functions."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    assert tensors.w13_scale is not None
    assert tensors.w2_scale is not None
    experts, device = shape.experts, tensors.w13.device
    workspace = marlin_utils.marlin_make_workspace_new(device, 4)
    # releases that support activation order require a permutation, which is empty here
    repack: Callable[..., Tensor] = ops.gptq_marlin_moe_repack
    with_order = "perm" in inspect.signature(repack).parameters
    order = [torch.empty(experts, 0, dtype=torch.int32, device=device)] if with_order else []

    def repacked(words: Tensor, scales: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        words = words.view(experts, rows, columns // 8).transpose(1, 2).contiguous()
        scales = scales.view(experts, rows, columns // GROUP_SIZE).transpose(1, 2).contiguous()
        return (
            repack(words, *order, columns, rows, 4),
            marlin_utils.marlin_moe_permute_scales(scales, columns, rows, GROUP_SIZE),
        )

    def moe_sum(z_TKH: Tensor, y_TH: Tensor, *_: object) -> Tensor:
        ops.moe_sum(z_TKH, y_TH)
        return y_TH

    def run(weights: tuple[Tensor, ...], call: Call) -> Tensor:
        w1, w2, w1_scale, w2_scale = weights
        return fused_marlin_moe(
            *(call.x_TH, w1, w2, None, None, w1_scale, w2_scale, call.topk_weights_TK, call.topk_ids_TK),
            quant_type_id=scalar_types.uint4b8.id,
            global_num_experts=experts,
            moe_sum=moe_sum,
            workspace=workspace,
        )

    w1, w1_scale = repacked(tensors.w13, tensors.w13_scale, 2 * shape.width, shape.hidden)
    w2, w2_scale = repacked(tensors.w2, tensors.w2_scale, shape.hidden, shape.width)
    return Layer(run, [(w1, w2, w1_scale, w2_scale)])
