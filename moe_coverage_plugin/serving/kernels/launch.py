"""The forward pass of experts of unequal width by Triton kernels."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from moe_coverage_plugin.serving.kernels.down import down_decode_kernel, down_kernel, sum_kernel
from moe_coverage_plugin.serving.kernels.gate_up import gate_up_kernel
from moe_coverage_plugin.serving.kernels.quantization import quantize, quantize_channels
from moe_coverage_plugin.serving.kernels.routing import Routing, route
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED, LaunchPlan, Tiles, choose
from moe_coverage_plugin.serving.kernels.weights import KernelWeights

SUM_BLOCK = 1024


def ragged_experts(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: KernelWeights,
    activation: str = "silu",
    weight_on_input: bool = False,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """Sum over a token's experts of routing weight times ``down(act(gate(x)) * up(x))``.

    Nothing waits for the device, and every size follows from shapes, so a CUDA graph may capture it. Equal inputs give
    equal bits.

    Args:
        x_TH: hidden states, bfloat16, float16 or float32, in the dtype of plain weights of 16 bits and of scales.
        topk_weights_TK: routing weights, floating.
        topk_ids_TK: integer expert numbers; those of width 0 add nothing, nor do negative ones.
        weights: from ``prepare``.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
        weight_on_input: multiply the routing weight into the expert's input in place of its output.
        plan: kernels and tile sizes; by default those of ``choose``.

    Returns:
        ``y_TH`` in the dtype of ``x_TH``, summed in float32.
    """
    assert x_TH.shape[1] == weights.hidden
    assert weights.computed_in in (None, x_TH.dtype)
    assert topk_ids_TK.shape == topk_weights_TK.shape
    if len(x_TH) == 0 or (weights.width == 0 and weights.w2_bias is None):
        return torch.zeros_like(x_TH)
    x_TH, topk_weights_TK, topk_ids_TK = x_TH.contiguous(), topk_weights_TK.contiguous(), topk_ids_TK.contiguous()
    pairs = topk_ids_TK.numel()
    if plan is None:
        numbers = weights.experts, weights.hidden, weights.w2_weights, weights.bits
        plan = choose(pairs, *numbers, x_TH.itemsize, shared_memory(x_TH.device))
    # rows begin at multiples of 16 channels, which lets them be read in full words
    h_PN = x_TH.new_empty(pairs, -(-weights.padded_width // 16) * 16)
    y_TH = torch.empty_like(x_TH)
    layer = _Layer(weights, topk_weights_TK, topk_ids_TK, activation, weight_on_input)
    if plan.path == "decode":
        layer.gate_up(x_TH, h_PN, topk_ids_TK, None, plan.block_m, plan.gate_up)
        layer.down_decode(h_PN, y_TH, plan.down)
        return y_TH
    routing = route(topk_ids_TK, weights.table_E4, plan.block_m, weights.min_width)
    z_PH = x_TH.new_empty(pairs, weights.hidden, dtype=torch.float32 if plan.wide_sum else x_TH.dtype)
    layer.gate_up(x_TH, h_PN, routing.expert_of_tile, routing.sorted_pairs, plan.block_m, plan.gate_up)
    layer.down(h_PN, z_PH, routing, plan.block_m, plan.down)
    layer.sum(z_PH, y_TH)
    return y_TH


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a card's shared memory that one program may have; more than any needs where there is no card."""
    if device.type != "cuda":
        return LARGE_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class _Layer:
    """Launches of the kernels for one layer and routing."""

    def __init__(
        self,
        weights: KernelWeights,
        topk_weights_TK: Tensor,
        topk_ids_TK: Tensor,
        activation: str,
        weight_on_input: bool,
    ) -> None:
        self.weights, self.topk_weights_TK, self.topk_ids_TK = weights, topk_weights_TK, topk_ids_TK
        self.top_k, self.pairs = topk_ids_TK.shape[1], topk_ids_TK.numel()
        self.activation, self.weight_on_input = activation, weight_on_input

    def gate_up(
        self, x_TH: Tensor, h_PN: Tensor, experts: Tensor, sorted_pairs: Tensor | None, block_m: int, tiles: Tiles
    ) -> None:
        """Gate and up by tiles of pairs; without ``sorted_pairs`` every pair is a tile, and ``experts`` its expert."""
        weights, blocks_n = self.weights, triton.cdiv(self.weights.padded_width, tiles.block_n)
        if blocks_n == 0:
            return
        x_TH, token_scale_T = quantize(x_TH) if weights.bits == 8 else (x_TH, None)
        gate_up_kernel[(experts.numel() * blocks_n,)](
            *(x_TH, token_scale_T, weights.w13, weights.w13_scale, weights.w13_zero_point, weights.w13_bias),
            *(weights.table_E4, experts, sorted_pairs, self.topk_weights_TK, h_PN),
            *(self.pairs, experts.numel(), weights.hidden, blocks_n, h_PN.stride(0)),
            TOP_K=self.top_k,
            ACTIVATION=self.activation,
            HAS_BIAS=weights.w13_bias is not None,
            DIRECT=sorted_pairs is None,
            EVEN_K=weights.hidden % tiles.block_k == 0,
            **self._tiled(block_m, tiles),
            **self._common(x_TH, tiles),
        )

    def down(self, h_PN: Tensor, z_PH: Tensor, routing: Routing, block_m: int, tiles: Tiles) -> None:
        """Down by tiles of pairs."""
        weights, blocks_n = self.weights, triton.cdiv(self.weights.hidden, tiles.block_n)
        used = routing.expert_of_tile
        h_PN, pair_scale_P = self._quantized(h_PN)
        down_kernel[(used.numel() * blocks_n,)](
            *(h_PN, pair_scale_P, weights.w2, weights.w2_scale, weights.w2_zero_point, weights.w2_bias),
            *(weights.table_E4, used, routing.sorted_pairs, self.topk_weights_TK, z_PH),
            *(self.pairs, used.numel(), weights.hidden, blocks_n, h_PN.stride(0)),
            HAS_BIAS=weights.w2_bias is not None,
            EVEN_K=weights.unit % tiles.block_k == 0,
            **self._tiled(block_m, tiles),
            **self._common(h_PN, tiles),
        )

    def sum(self, z_PH: Tensor, y_TH: Tensor) -> None:
        """The sum of every token's pairs."""
        weights = self.weights
        block = min(SUM_BLOCK, triton.next_power_of_2(weights.hidden))
        sum_kernel[(len(y_TH), triton.cdiv(weights.hidden, block))](
            *(z_PH, weights.table_E4, self.topk_ids_TK, y_TH, weights.hidden),
            TOP_K=self.top_k,
            MIN_WIDTH=weights.min_width,
            BLOCK=block,
        )

    def down_decode(self, h_PN: Tensor, y_TH: Tensor, tiles: Tiles) -> None:
        """Down and the sum, token by token."""
        weights, blocks_n = self.weights, triton.cdiv(self.weights.hidden, tiles.block_n)
        h_PN, pair_scale_P = self._quantized(h_PN)
        down_decode_kernel[(len(y_TH) * blocks_n,)](
            *(h_PN, pair_scale_P, weights.w2, weights.w2_scale, weights.w2_zero_point, weights.w2_bias),
            *(weights.table_E4, self.topk_ids_TK, self.topk_weights_TK, y_TH),
            *(weights.hidden, blocks_n, h_PN.stride(0)),
            TOP_K=self.top_k,
            HAS_BIAS=weights.w2_bias is not None,
            SLOTS=triton.next_power_of_2(self.top_k),
            STAGES=tiles.stages,
            **self._common(h_PN, tiles),
        )

    def _quantized(self, h_PN: Tensor) -> tuple[Tensor, Tensor | None]:
        weights = self.weights
        if weights.bits != 8:
            return h_PN, None
        return quantize_channels(h_PN, self.topk_ids_TK.flatten(), weights.table_E4, weights.unit)

    @staticmethod
    def _tiled(block_m: int, tiles: Tiles) -> dict[str, int | bool]:
        return {"BLOCK_M": block_m, "GROUP": tiles.group, "SWAP": tiles.swap}

    def _common(self, x: Tensor, tiles: Tiles) -> dict[str, int | bool]:
        weights = self.weights
        return {
            "WEIGHT_ON_INPUT": self.weight_on_input,
            "BITS": weights.bits,
            "GROUP_SIZE": weights.group_size,
            "HAS_ZERO": weights.w2_zero_point is not None,
            "UNIT": weights.unit,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "FAST": weights.bits == 4 and x.itemsize == 2 and x.is_cuda,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
