"""Random layers in the layout of the kernels, random routing, and the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_coverage_plugin.core.ragged import reference_moe
from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.serving.kernels.tiles import LaunchPlan, Tiles
from moe_coverage_plugin.serving.kernels.weights import KernelWeights, prepare
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights
from tests.serving.random_experts import RaggedExperts

TOP_K = 2
GUARD = 4096
"""Elements before and after each tensor of weights."""

# together, the plans have both values of every constant of kernels, in sizes that the interpreter can run
PLANS = {
    "decode": LaunchPlan("decode", Tiles(64, 64), Tiles(64, 64, num_stages=1)),
    "decode-wide": LaunchPlan("decode", Tiles(64, 32), Tiles(16, 128)),
    "tiled-swap": LaunchPlan("tiled", Tiles(64, 32, group_m=2), Tiles(128, 32), block_m=16),
    "tiled-narrow": LaunchPlan("tiled", Tiles(32, 32), Tiles(64, 64), block_m=8),
    "tiled-swap-long": LaunchPlan("tiled", Tiles(32, 64), Tiles(64, 128, group_m=3), block_m=32),
    "tiled": LaunchPlan(
        "tiled",
        Tiles(64, 64, group_m=2, swap_ab=False),
        Tiles(64, 64, swap_ab=False),
        block_m=32,
        float32_z=True,
        promote=False,
    ),
}
DECODE = PLANS["decode"]
TILED = PLANS["tiled-swap"]
NARROW = PLANS["tiled-narrow"]

UNALIGNED = [40, 0, 200, 33, 1]
"""Widths without a common divisor, including a removed expert and one of a single channel."""

SCHEMES = {
    "plain": (ExpertScheme(), UNALIGNED, 96),
    "plain-aligned": (ExpertScheme(), [128, 0, 256], 128),
    "group-32": (ExpertScheme(4, 32), [32, 0, 96, 128], 96),
    "group-64": (ExpertScheme(4, 64), [64, 0, 128], 128),
    "group-128": (ExpertScheme(4, 128), [128, 0, 256], 128),
    "channel": (ExpertScheme(4, None), [40, 0, 200, 8], 104),
    "group-32-zeros": (ExpertScheme(4, 32, zero_points=True), [32, 0, 96, 128], 96),
    "group-128-zeros": (ExpertScheme(4, 128, zero_points=True), [128, 0, 256], 128),
    "channel-zeros": (ExpertScheme(4, None, zero_points=True), [40, 0, 200, 9], 104),
    "float8": (ExpertScheme(8), UNALIGNED, 96),
    "float8-aligned": (ExpertScheme(8), [128, 0, 256], 128),
}


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with NaN or bytes of 255 before and after it, which change results if a kernel reads beyond it."""
    wide = torch.full((tensor.numel() + 2 * GUARD,), torch.nan if tensor.is_floating_point() else 255).to(tensor)
    wide[GUARD:-GUARD] = tensor.flatten()
    return wide[GUARD:-GUARD].view(tensor.shape)


class RandomLayer:
    """The weights of random experts on one rank.

    Attributes:
        experts: the experts as stored in a checkpoint.
        weights: the rank's weights in the layout of the kernels.
    """

    def __init__(
        self,
        device: torch.device,
        scheme: str = "plain",
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = False,
        experts: RaggedExperts | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        quantization, widths, hidden = SCHEMES[scheme]
        self.experts = experts or RaggedExperts(widths, hidden, quantization, dtype, bias)
        self.device, self.dtype = device, self.experts.dtype
        self.weights = self._prepare(rank, world_size)

    def _prepare(self, rank: int, world_size: int) -> KernelWeights:
        storage, layer = self.experts.loaded(rank, world_size)
        loaded = storage.parameters(layer)
        weights = prepare(
            RaggedWeights(*(None if tensor is None else tensor.data.to(self.device) for tensor in loaded)),
            widths_E=storage.local.widths_E,
            hidden=self.experts.hidden,
            group_size=self.experts.scheme.group_size,
        )
        tensors = (None if tensor is None else guarded(tensor) for tensor in weights.tensors)
        return replace(weights, tensors=RaggedWeights(*tensors), table_E4=guarded(weights.table_E4))

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, routing weights, and a different kept expert for each slot of a token."""
        widths = torch.tensor(self.experts.widths)
        logits = torch.randn(tokens, len(widths)).masked_fill(widths == 0, -torch.inf)
        weights_TK, ids_TK = logits.softmax(-1).topk(TOP_K)
        return self.hidden_states(tokens), weights_TK.to(self.device), ids_TK.to(self.device, torch.int32)

    def hidden_states(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.experts.hidden).to(self.device, self.dtype)

    def reference(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        activation: str = "silu",
        weight_on_input: bool = False,
    ) -> torch.Tensor:
        """Return the output in float64; removed experts add nothing, nor do numbers that no expert has."""
        x_TH, weights_TK, ids_TK = x_TH.cpu(), weights_TK.cpu(), ids_TK.cpu().long()
        widths_E = torch.tensor(self.experts.widths)
        kept_TK = (ids_TK >= 0) & (ids_TK < len(widths_E)) & (widths_E[ids_TK.clamp(0, len(widths_E) - 1)] > 0)
        ids_TK = ids_TK.where(kept_TK, widths_E.argmax())
        if not weight_on_input:
            return self._reference(x_TH, ids_TK, weights_TK.where(kept_TK, 0.0), activation)
        # models round the weighted input to the dtype of the hidden states
        slots = zip(weights_TK.unbind(1), ids_TK.unbind(1), kept_TK.unbind(1), strict=True)
        return sum(
            self._reference((x_TH * w_T[:, None]).to(x_TH.dtype), ids_T[:, None], kept_T[:, None].double(), activation)
            for w_T, ids_T, kept_T in slots
        )

    def _reference(self, x_TH, ids_TK, weights_TK, activation: str) -> torch.Tensor:
        experts = self.experts
        act_fn = ACTIVATIONS[activation]
        return reference_moe(x_TH.double(), ids_TK, weights_TK, experts.weights, act_fn, experts.rounded)

    @property
    def bound(self) -> float:
        """The largest error of a token's output relative to its norm."""
        bits = self.experts.scheme.bits
        # a card accumulates products of 8-bit floats in fewer bits than float32
        if self.dtype == torch.float32 and bits != 8:
            return 1e-5
        return 2e-2 if bits == 4 else 1e-2

    def assert_close(self, found_TH: torch.Tensor, expected_TH: torch.Tensor) -> None:
        """Assert that the errors of all tokens are within the bound.

        With 8 bits, this holds for nine of ten tokens, and the error of the others is below 1/8: if the largest
        activation of a token is rounded differently, so are its scale and all of its 8-bit values, whose relative
        distance is 1/8.
        """
        errors_T = errors(found_TH, expected_TH)
        if self.experts.scheme.bits != 8:
            assert errors_T.max() < self.bound, errors_T
            return
        assert errors_T.max() < 1 / 8, errors_T
        assert errors_T.quantile(0.9, interpolation="lower") < self.bound, errors_T


def errors(found_TH: torch.Tensor, expected_TH: torch.Tensor) -> torch.Tensor:
    """Return the errors of tokens relative to the norm of the expected output; expected zeros must be exact."""
    difference_T = (found_TH.cpu().double() - expected_TH).norm(dim=-1)
    assert not difference_T.isnan().any()
    norm_T = expected_TH.norm(dim=-1)
    assert not difference_T[norm_T == 0].any()
    return difference_T / norm_T.clamp(min=1e-30)


def error(found_TH: torch.Tensor, expected_TH: torch.Tensor) -> float:
    """Return the largest relative error of a token."""
    return float(errors(found_TH, expected_TH).max())
