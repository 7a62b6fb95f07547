"""Random layers as the kernels take them, routing, and the judge in float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_coverage_plugin.core.ragged import reference_moe
from moe_coverage_plugin.serving.kernels.tiles import LaunchPlan, Tiles
from moe_coverage_plugin.serving.kernels.weights import KernelWeights, prepare
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS
from moe_coverage_plugin.serving.scheme import ExpertScheme
from tests.serving.random_experts import RaggedExperts

TOP_K = 2
AROUND = 4096
WEIGHTS = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias", "w13_zero_point", "w2_zero_point")

# Every constant that changes what a kernel computes, both ways, in sizes that a test can afford.
PLANS = {
    "decode": LaunchPlan("decode", Tiles(64, 64), Tiles(64, 64, stages=1)),
    "decode-wide": LaunchPlan("decode", Tiles(64, 32), Tiles(16, 128)),
    "tiled-swap": LaunchPlan("tiled", Tiles(64, 32, group=2), Tiles(128, 32), block_m=16),
    "tiled-swap-long": LaunchPlan("tiled", Tiles(32, 64), Tiles(64, 128, group=3), block_m=32),
    "tiled": LaunchPlan(
        "tiled", Tiles(64, 64, group=2, swap=False), Tiles(64, 64, swap=False), block_m=32, wide_sum=True
    ),
}
FEW = PLANS["decode"]
MANY = PLANS["tiled-swap"]

UGLY = [40, 0, 200, 33, 1]  # nothing, one channel, and no multiple of anything
SCHEMES = {
    "plain": (ExpertScheme(), UGLY, 96),
    "plain-blocks": (ExpertScheme(), [128, 0, 256], 128),
    "group-32": (ExpertScheme(4, 32), [32, 0, 96, 128], 96),
    "group-64": (ExpertScheme(4, 64), [64, 0, 128], 128),
    "group-128": (ExpertScheme(4, 128), [128, 0, 256], 128),
    "channel": (ExpertScheme(4, None), [40, 0, 200, 8], 104),
    "group-32-zeros": (ExpertScheme(4, 32, zero_points=True), [32, 0, 96, 128], 96),
    "group-128-zeros": (ExpertScheme(4, 128, zero_points=True), [128, 0, 256], 128),
    "channel-zeros": (ExpertScheme(4, None, zero_points=True), [40, 0, 200, 9], 104),
    "float8": (ExpertScheme(8), UGLY, 96),
    "float8-blocks": (ExpertScheme(8), [128, 0, 256], 128),
}


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, between numbers that nobody may read."""
    wide = torch.full((tensor.numel() + 2 * AROUND,), torch.nan if tensor.is_floating_point() else 255).to(tensor)
    wide[AROUND:-AROUND] = tensor.flatten()
    return wide[AROUND:-AROUND].view(tensor.shape)


class RandomLayer:
    """One rank's part of random experts, on the device.

    Attributes:
        experts: what the checkpoint stores of them.
        weights: as the kernels take them.
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
        weights = prepare(
            *(None if tensor is None else tensor.data.to(self.device) for tensor in storage.parameters(layer)),
            widths_E=storage.local.widths_E,
            hidden=self.experts.hidden,
            group_size=self.experts.scheme.group_size,
        )
        fields = {name: getattr(weights, name) for name in WEIGHTS}
        return replace(weights, **{name: surrounded(t) for name, t in fields.items() if t is not None})

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, routing weights and different live experts for every token."""
        widths = torch.tensor(self.experts.widths)
        logits = torch.randn(tokens, len(widths)).masked_fill(widths == 0, -torch.inf)
        weights_TK, ids_TK = logits.softmax(-1).topk(TOP_K)
        return self.hidden_states(tokens), weights_TK.to(self.device), ids_TK.to(self.device, torch.int32)

    def hidden_states(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.experts.hidden).to(self.device, self.dtype)

    def judge(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        activation: str = "silu",
        weight_on_input: bool = False,
    ) -> torch.Tensor:
        """The output in float64; experts that are not there add nothing."""
        x_TH, weights_TK, ids_TK = x_TH.cpu(), weights_TK.cpu(), ids_TK.cpu().long()
        widths_E = torch.tensor(self.experts.widths)
        live_TK = (ids_TK >= 0) & (widths_E[ids_TK.clamp(min=0)] > 0)
        ids_TK = ids_TK.where(live_TK, widths_E.argmax())
        if not weight_on_input:
            return self._reference(x_TH, ids_TK, weights_TK.where(live_TK, 0.0), activation)
        # as the model has it: the product is rounded to the type of the hidden states
        parts = zip(weights_TK.unbind(1), ids_TK.unbind(1), live_TK.unbind(1), strict=True)
        return sum(
            self._reference((x_TH * w_T[:, None]).to(x_TH.dtype), ids_T[:, None], live_T[:, None].double(), activation)
            for w_T, ids_T, live_T in parts
        )

    def _reference(self, x_TH, ids_TK, weights_TK, activation: str) -> torch.Tensor:
        experts = self.experts
        act_fn = ACTIVATIONS[activation]
        return reference_moe(x_TH.double(), ids_TK, weights_TK, experts.weights, act_fn, experts.rounded)

    @property
    def bound(self) -> float:
        """The largest error of a token's output relative to its norm."""
        bits = self.experts.scheme.bits
        # a card sums products of 8-bit floats in fewer bits
        if self.dtype == torch.float32 and bits != 8:
            return 1e-5
        return 2e-2 if bits == 4 else 1e-2

    def assert_right(self, found_TH: torch.Tensor, expected_TH: torch.Tensor) -> None:
        """All tokens within the bound; of 8 bits nine in ten, and the others an eighth at most.

        Where the largest activation of a token is rounded otherwise, so is its scale, and with it all others; 8-bit
        floats lie an eighth apart.
        """
        errors_T = errors(found_TH, expected_TH)
        if self.experts.scheme.bits != 8:
            assert errors_T.max() < self.bound, errors_T
            return
        assert errors_T.max() < 1 / 8, errors_T
        assert errors_T.quantile(0.9, interpolation="lower") < self.bound, errors_T


def errors(found_TH: torch.Tensor, expected_TH: torch.Tensor) -> torch.Tensor:
    """Errors of tokens relative to the norm of what is expected; tokens of zeros must be zeros."""
    difference_T = (found_TH.cpu().double() - expected_TH).norm(dim=-1)
    assert not difference_T.isnan().any()
    norm_T = expected_TH.norm(dim=-1)
    assert not difference_T[norm_T == 0].any()
    return difference_T / norm_T.clamp(min=1e-30)


def error(found_TH: torch.Tensor, expected_TH: torch.Tensor) -> float:
    """The largest error of a token."""
    return float(errors(found_TH, expected_TH).max())
