"""Triton kernels for mixture-of-experts layers whose experts differ in width; torch and Triton only.

A forward pass computes ``y[t] = sum over k of routing_weight[t, k] * down(act(gate(x[t])) * up(x[t]))``, where slot
``k`` of token ``t`` uses the weights of the expert that the router chose for it. ``launch`` does this in one of two
ways, and ``tiles`` chooses between them by shapes:

- decode, for few tokens: ``gate_up_kernel`` with one pair of token and slot per tile, then ``down_decode_kernel``;
- tiled: ``route`` sorts pairs into tiles, then ``gate_up_kernel``, ``down_kernel`` and ``sum_kernel``.

With 8-bit floats, ``quantize_kernel`` quantizes the input of each projection. ``prepare`` brings weights into the
kernels' layout once. The reference that the forward pass is tested against is ``core.ragged.reference_moe``.

Tensors and pointers carry the axis suffixes of ``core``: ``M`` routed rows, one per pair of token and slot, ``A``
input features, ``O`` output features, ``N`` channels of an expert, ``H`` hidden size, ``T`` tokens, ``K`` slots, ``E``
experts. A tile of an axis keeps the letter of the axis.

Constants that several kernels have:

- ``BLOCK_M``, ``BLOCK_N``, ``BLOCK_K``: tile sizes of a matrix product along ``M``, ``O`` and ``A``, as in Triton's
  tutorials; ``GROUP_M``: see ``tile_of_program``;
- ``BITS``, ``GROUP_SIZE``, ``UNIT``: see ``KernelWeights``; ``HAS_ZERO_POINT``, ``HAS_BIAS``: which tensors exist;
- ``NUM_EXPERTS``: rows of the table of experts, see ``known_expert``;
- ``TOP_K``: slots per token; ``WEIGHT_ON_INPUT``: multiply the routing weight into ``x`` instead of ``z``;
- ``EVEN_K``: whether ``BLOCK_K`` divides the input features of all experts, so that loads need no mask along them;
- ``SWAP_AB``: see ``mma``; ``PROMOTE``: see ``dot``; ``INLINE_PTX``: see ``int4``; ``PDL``: see ``dependent_launch``;
- ``NARROW``: tiles of 8 pairs, whose dot products Triton computes with ``mma.sync``, see ``unpack_step``.
"""

from moe_coverage_plugin.serving.kernels.compilation import compile_ahead
from moe_coverage_plugin.serving.kernels.operator import run_kernels
from moe_coverage_plugin.serving.kernels.weights import KernelWeights, prepare, unsupported_reason

__all__ = ["KernelWeights", "compile_ahead", "prepare", "run_kernels", "unsupported_reason"]
