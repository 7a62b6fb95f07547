"""The forward pass of experts of unequal width: which kernels run, with which grids and arguments."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_coverage_plugin.serving.kernels.dependent_launch import launch_options
from moe_coverage_plugin.serving.kernels.down import down_decode_kernel, down_kernel, sum_kernel
from moe_coverage_plugin.serving.kernels.gate_up import gate_up_kernel
from moe_coverage_plugin.serving.kernels.quantization import quantize, quantize_channels
from moe_coverage_plugin.serving.kernels.routing import Routing, next_power_of_2, route, routing_bytes
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED_MEMORY, LaunchPlan, Tiles, choose_plan
from moe_coverage_plugin.serving.kernels.weights import KernelWeights

SUM_BLOCK = 1024
"""Channels that one program of ``sum_kernel`` sums."""

WORKSPACE_BYTES = 2**31
"""Most bytes of intermediate results; more tokens than fit are computed in equal parts, one after another.

The largest published layer (8 experts per token, hidden size 7168, 2048 channels) takes 147 KB a token in 16 bits:
14,500 tokens fit, more than vLLM schedules at once by default (8192), and 65,536 tokens need five parts instead of
9.7 GB. Parts of this size have hundreds of tokens per expert, so reading the weights again costs little.
"""

PART_ALIGNMENT = 16
"""Tokens of whose multiples parts consist: Triton compiles kernels for tensors that begin at multiples of 16 bytes."""


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
    equal bits. Tested against ``core.ragged.reference_moe``.

    Args:
        x_TH: hidden states, bfloat16, float16 or float32, in ``weights.hidden_dtype``.
        topk_weights_TK: routing weights, floating.
        topk_ids_TK: integer experts. Those of width 0 add nothing except for their bias; numbers that no expert has,
            such as -1 for padding, add nothing, and nothing is read for them.
        weights: from ``prepare``.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
        weight_on_input: multiply the routing weight into the expert's input instead of its output.
        plan: kernels and tile sizes, by default those of ``choose_plan``.

    Returns:
        ``y_TH`` in the dtype of ``x_TH``, summed in float32.
    """
    assert x_TH.shape[1] == weights.hidden
    assert weights.hidden_dtype in (None, x_TH.dtype)
    assert topk_ids_TK.shape == topk_weights_TK.shape
    tokens = x_TH.shape[0]
    if tokens == 0 or (weights.max_width == 0 and weights.tensors.w2_bias is None):
        return torch.zeros_like(x_TH)
    x_TH, topk_weights_TK, topk_ids_TK = x_TH.contiguous(), topk_weights_TK.contiguous(), topk_ids_TK.contiguous()
    num_pairs = topk_ids_TK.numel()
    if plan is None:
        numbers = weights.experts, weights.hidden, weights.w2_numel, weights.bits
        plan = choose_plan(num_pairs, *numbers, x_TH.itemsize, shared_memory(x_TH.device))
    y_TH = torch.empty_like(x_TH)
    options = weights, activation, weight_on_input, plan
    per_part = tokens_per_part(tokens, topk_ids_TK.shape[1], weights, x_TH.itemsize, plan)
    if per_part >= tokens:
        _compute(x_TH, topk_weights_TK, topk_ids_TK, y_TH, *options)
        return y_TH
    for first in range(0, tokens, per_part):
        part = slice(first, first + per_part)
        _compute(x_TH[part], topk_weights_TK[part], topk_ids_TK[part], y_TH[part], *options)
    return y_TH


def tokens_per_part(tokens: int, top_k: int, weights: KernelWeights, itemsize: int, plan: LaunchPlan) -> int:
    """Tokens that are computed at once, so that intermediate results take at most ``WORKSPACE_BYTES``.

    Parts are equal except for the last, and follow from shapes, so a CUDA graph has the same parts whenever it is
    replayed. A token's output does not depend on the part that it is in.

    Args:
        tokens: number of tokens.
        top_k: experts per token.
        weights: of the layer.
        itemsize: bytes of an element of the hidden states.
        plan: kernels and tile sizes.
    """
    # a rank without channels may need none
    fitting = WORKSPACE_BYTES // max(1, workspace_bytes(top_k, weights, itemsize, plan))
    if tokens <= fitting:
        return tokens
    parts = -(-tokens // (max(1, fitting // PART_ALIGNMENT) * PART_ALIGNMENT))
    return -(-tokens // (parts * PART_ALIGNMENT)) * PART_ALIGNMENT


def workspace_bytes(top_k: int, weights: KernelWeights, itemsize: int, plan: LaunchPlan) -> int:
    """Bytes of intermediate results for each token, except for padding of the last tile of each expert."""
    channels, hidden = h_stride(weights), weights.hidden
    per_pair = channels * itemsize
    if plan.path == "tiled":
        per_pair += hidden * (4 if plan.float32_z else itemsize) + routing_bytes(weights.experts)
    if weights.bits == 8:
        # values and a scale
        per_pair += channels + 4
    return top_k * per_pair + (hidden + 4 if weights.bits == 8 else 0)


def h_stride(weights: KernelWeights) -> int:
    """Row stride of ``h_MN``: a multiple of 16 channels lets Triton load rows as vectors."""
    return -(-weights.max_padded_width // 16) * 16


def _compute(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    y_TH: Tensor,
    weights: KernelWeights,
    activation: str,
    weight_on_input: bool,
    plan: LaunchPlan,
) -> None:
    """Write ``y_TH`` for some tokens; other arguments as for ``ragged_experts``, contiguous."""
    num_pairs = topk_ids_TK.numel()
    h_MN = x_TH.new_empty(num_pairs, h_stride(weights))
    call = _LayerCall(weights, topk_weights_TK, topk_ids_TK, activation, weight_on_input, plan)
    if plan.path == "decode":
        call.gate_up(x_TH, h_MN, topk_ids_TK, None)
        call.down_decode(h_MN, y_TH)
        return
    routing = route(topk_ids_TK, weights.table_E4, plan.block_m, weights.min_width)
    z_MH = x_TH.new_empty(num_pairs, weights.hidden, dtype=torch.float32 if plan.float32_z else x_TH.dtype)
    call.gate_up(x_TH, h_MN, routing.expert_of_tile, routing.sorted_pairs)
    call.down(h_MN, z_MH, routing)
    call.sum(z_MH, y_TH)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a card's shared memory that one program may have; without a card, more than any kernel needs."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class _LayerCall:
    """Launches of the kernels for one layer and one routing."""

    def __init__(
        self,
        weights: KernelWeights,
        topk_weights_TK: Tensor,
        topk_ids_TK: Tensor,
        activation: str,
        weight_on_input: bool,
        plan: LaunchPlan,
    ) -> None:
        self.weights, self.topk_weights_TK, self.topk_ids_TK = weights, topk_weights_TK, topk_ids_TK
        self.top_k, self.num_pairs = topk_ids_TK.shape[1], topk_ids_TK.numel()
        self.activation, self.weight_on_input, self.plan = activation, weight_on_input, plan

    def gate_up(self, x_TH: Tensor, h_MN: Tensor, experts: Tensor, sorted_pairs: Tensor | None) -> None:
        """Write ``h_MN``. Without ``sorted_pairs``, every pair is a tile and ``experts`` are those of pairs."""
        weights, tensors, tiles = self.weights, self.weights.tensors, self.plan.gate_up
        num_tiles_n = -(-weights.max_padded_width // tiles.block_n)
        if num_tiles_n == 0:
            return
        x_TH, x_scale_T = quantize(x_TH) if weights.bits == 8 else (x_TH, None)
        gate_up_kernel[(experts.numel() * num_tiles_n,)](
            *(x_TH, x_scale_T, tensors.w13, tensors.w13_scale, tensors.w13_zero_point, tensors.w13_bias),
            *(weights.table_E4, experts, sorted_pairs, self.topk_weights_TK, h_MN),
            *(self.num_pairs, experts.numel(), weights.hidden, num_tiles_n, h_MN.stride(0)),
            TOP_K=self.top_k,
            ACTIVATION=self.activation,
            HAS_BIAS=tensors.w13_bias is not None,
            ONE_PAIR_PER_TILE=sorted_pairs is None,
            NUM_EXPERTS=weights.experts,
            EVEN_K=weights.hidden % tiles.block_k == 0,
            **self._constants_of_tiles(tiles),
            **self._constants(x_TH, tiles),
            **launch_options(x_TH.device, self.plan.early),
        )

    def down(self, h_MN: Tensor, z_MH: Tensor, routing: Routing) -> None:
        """Write ``z_MH``, the weighted outputs of all pairs that have a tile."""
        weights, tensors, tiles = self.weights, self.weights.tensors, self.plan.down
        num_tiles_m = routing.expert_of_tile.numel()
        num_tiles_n = -(-weights.hidden // tiles.block_n)
        h_MN, h_scale_M = self._quantize_h(h_MN)
        down_kernel[(num_tiles_m * num_tiles_n,)](
            *(h_MN, h_scale_M, tensors.w2, tensors.w2_scale, tensors.w2_zero_point, tensors.w2_bias),
            *(weights.table_E4, routing.expert_of_tile, routing.sorted_pairs, self.topk_weights_TK, z_MH),
            *(self.num_pairs, num_tiles_m, weights.hidden, num_tiles_n, h_MN.stride(0)),
            HAS_BIAS=tensors.w2_bias is not None,
            EVEN_K=weights.unit % tiles.block_k == 0,
            **self._constants_of_tiles(tiles),
            **self._constants(h_MN, tiles),
            **launch_options(h_MN.device, self.plan.early),
        )

    def sum(self, z_MH: Tensor, y_TH: Tensor) -> None:
        """Write ``y_TH``, the sum over the slots of each token."""
        weights = self.weights
        block_h = min(SUM_BLOCK, next_power_of_2(weights.hidden))
        sum_kernel[(len(y_TH), -(-weights.hidden // block_h))](
            *(z_MH, weights.table_E4, self.topk_ids_TK, y_TH, weights.hidden),
            TOP_K=self.top_k,
            NUM_EXPERTS=weights.experts,
            MIN_WIDTH=weights.min_width,
            BLOCK_H=block_h,
            **launch_options(z_MH.device),
        )

    def down_decode(self, h_MN: Tensor, y_TH: Tensor) -> None:
        """Write ``y_TH`` without routing: projection and sum for one token per program."""
        weights, tensors, tiles = self.weights, self.weights.tensors, self.plan.down
        num_tiles_n = -(-weights.hidden // tiles.block_n)
        h_MN, h_scale_M = self._quantize_h(h_MN)
        down_decode_kernel[(len(y_TH) * num_tiles_n,)](
            *(h_MN, h_scale_M, tensors.w2, tensors.w2_scale, tensors.w2_zero_point, tensors.w2_bias),
            *(weights.table_E4, self.topk_ids_TK, self.topk_weights_TK, y_TH),
            *(weights.hidden, num_tiles_n, h_MN.stride(0)),
            TOP_K=self.top_k,
            HAS_BIAS=tensors.w2_bias is not None,
            SLOTS=next_power_of_2(self.top_k),
            NUM_EXPERTS=weights.experts,
            NUM_STAGES=tiles.num_stages,
            **self._constants(h_MN, tiles),
            **launch_options(h_MN.device, self.plan.early),
        )

    def _quantize_h(self, h_MN: Tensor) -> tuple[Tensor, Tensor | None]:
        weights = self.weights
        if weights.bits != 8:
            return h_MN, None
        return quantize_channels(h_MN, self.topk_ids_TK.flatten(), weights.table_E4, weights.unit)

    def _constants_of_tiles(self, tiles: Tiles) -> dict[str, int | bool]:
        block_m, promote = self.plan.block_m, self.plan.promote
        return {"BLOCK_M": block_m, "GROUP_M": tiles.group_m, "SWAP_AB": tiles.swap_ab, "PROMOTE": promote}

    def _constants(self, x: Tensor, tiles: Tiles) -> dict[str, int | bool]:
        weights = self.weights
        return {
            "WEIGHT_ON_INPUT": self.weight_on_input,
            "BITS": weights.bits,
            "GROUP_SIZE": weights.group_size,
            "HAS_ZERO_POINT": weights.tensors.w2_zero_point is not None,
            "UNIT": weights.unit,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "INLINE_PTX": weights.bits == 4 and x.itemsize == 2 and x.is_cuda,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
