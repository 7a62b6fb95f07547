"""Layers of random weights: ours, and vLLM's from the same flat tensors.

vLLM and Triton are imported where they are used: rows are rendered and tested without either.
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


class Call(NamedTuple):
    """Arguments of a layer: bfloat16 hidden states, float32 routing weights, int32 experts."""

    x_TH: Tensor
    topk_weights_TK: Tensor
    topk_ids_TK: Tensor


@dataclass(frozen=True)
class Layer:
    """A way to run a layer, and its weights in as many copies as were asked for so far."""

    run: Callable[[Any, Call], Tensor]
    copies: list[Any]

    def copied(self, count: int) -> list[Any]:
        """``count`` copies of the weights."""
        while len(self.copies) < count:
            self.copies.append(copy.deepcopy(self.copies[0]))
        return self.copies[:count]


def draw(shape: Shape, tokens: int, generator: torch.Generator) -> Call:
    """Random hidden states, and the renormalized top of a random router."""
    common = {"device": generator.device, "generator": generator}
    x_TH = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **common)
    top = torch.randn(tokens, shape.experts, **common).softmax(-1).topk(shape.top_k)
    return Call(x_TH, top.values / top.values.sum(-1, keepdim=True), top.indices.int())


def random_tensors(widths_E: Sequence[int], hidden: int, bits: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """``w13``, ``w2`` and, of 4 bits, their scales: flat, as ``prepare`` takes them."""
    values = sum(widths_E) * hidden
    common = {"device": generator.device, "generator": generator}
    if bits == 16:
        return tuple(torch.randn(n, dtype=torch.bfloat16, **common).mul_(0.02) for n in (2 * values, values))
    words = [torch.randint(-(2**31), 2**31 - 1, (n // 8,), dtype=torch.int32, **common) for n in (2 * values, values)]
    sizes = (2 * values // GROUP_SIZE, values // GROUP_SIZE)
    scales = [torch.rand(n, dtype=torch.bfloat16, **common).mul_(0.01) for n in sizes]
    return *words, *scales


def ours(tensors: tuple[Tensor, ...], widths_E: Sequence[int], hidden: int) -> Layer:
    """Our layer; packed tensors are overwritten."""
    from moe_coverage_plugin.serving.kernels import prepare, run_kernels

    def run(weights: Any, call: Call) -> Tensor:
        return run_kernels(*call, weights, "silu", False)

    group_size = GROUP_SIZE if len(tensors) == 4 else None
    return Layer(run, [prepare(*tensors, widths_E=widths_E, hidden=hidden, group_size=group_size)])


def stock(tensors: tuple[Tensor, ...], shape: Shape) -> dict[str, Layer]:
    """vLLM's layers of one width, by their choice of tiles; tensors are left as they are."""
    return _triton(tensors, shape) if len(tensors) == 2 else {"Marlin": _marlin(tensors, shape)}


def _triton(tensors: tuple[Tensor, ...], shape: Shape) -> dict[str, Layer]:
    """Triton kernels with vLLM's own choice and, where that is no tuned one, what is tuned for the unpruned width."""
    from vllm.model_executor.layers.fused_moe import fused_experts, override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    def with_table(table: dict[int, Any] | None) -> Callable[[Any, Call], Tensor]:
        def run(weights: tuple[Tensor, Tensor], call: Call) -> Tensor:
            tokens = len(call.x_TH)
            # None is vLLM's own choice, said so because a call that failed leaves its table behind
            config = table[min(table, key=lambda size: abs(size - tokens))] if table else None
            with override_config(config):
                return fused_experts(call.x_TH, *weights, call.topk_weights_TK, call.topk_ids_TK)

        return run

    experts, width, hidden = shape.experts, shape.width, shape.hidden
    copies = [(tensors[0].view(experts, 2 * width, hidden), tensors[1].view(experts, hidden, width))]
    layers = {"own choice": Layer(with_table(None), copies)}
    unpruned = get_moe_configs(experts, shape.channels, None)
    if unpruned and not get_moe_configs(experts, width, None):
        layers[f"tuned for {shape.channels} channels"] = Layer(with_table(unpruned), copies)
    return layers


def _marlin(tensors: tuple[Tensor, ...], shape: Shape) -> Layer:
    """Marlin as the engine calls it, its weights in its layout by vLLM's own functions."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    experts, device = shape.experts, tensors[0].device
    workspace = marlin_utils.marlin_make_workspace_new(device, 4)
    # releases that still know activation order take its permutation, here none
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

    w1, w1_scale = repacked(tensors[0], tensors[2], 2 * shape.width, shape.hidden)
    w2, w2_scale = repacked(tensors[1], tensors[3], shape.hidden, shape.width)
    return Layer(run, [(w1, w2, w1_scale, w2_scale)])
