"""The tensors of a layer's experts, as loaders fill them and as forward passes take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IDS_DTYPE, ROUTING_WEIGHT_DTYPE = torch.int32, torch.float32
"""Of what routers deliver: numbers of experts as they are asked for, and weights as all routers of vLLM have them."""


class RaggedWeights(NamedTuple):
    """Flat tensors of a layer's experts, each with one matrix per expert, end to end.

    ``ExpertShapes`` describes the layout of loaded tensors, ``KernelWeights`` that of the kernels. Operators take
    these tensors one by one, in this order, because a schema of torch has no tuples of optional tensors.

    Attributes:
        w13: ``gate_proj`` above ``up_proj``, vLLM's name.
        w2: ``down_proj``, vLLM's name.
        w13_scale: scales of ``w13``, for 4 and 8 bits.
        w2_scale: scales of ``w2``, for 4 and 8 bits.
        w13_bias: biases of ``w13``, if the experts have any.
        w2_bias: biases of ``w2``, if the experts have any.
        w13_zero_point: zero points of ``w13``, for asymmetric 4-bit weights.
        w2_zero_point: zero points of ``w2``, for asymmetric 4-bit weights.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
