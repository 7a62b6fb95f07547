"""Random experts of unequal width: the tensors in a checkpoint, and the weights for the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from moe_coverage_plugin.core.ragged import ExpertWeights
from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.serving.storage import DOWN, GATE, UP, ExpertStorage

# the range of a group's values includes zero
EDGES = ((None, 0), (0, None))
PROJECTIONS = {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"}


def float8_values(x: torch.Tensor) -> torch.Tensor:
    """Round float64 rows to the nearest 8-bit floats, ties to even, with a scale by the largest value of each row."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / values[-1] if x.numel() else 1.0
    wanted = x.abs() / scale
    above = torch.searchsorted(values, wanted).clamp(1, len(values) - 1)
    to_low, to_high = wanted - values[above - 1], values[above] - wanted
    # the last bit of a value's mantissa is the last bit of its index
    is_low = (to_low < to_high) | ((to_low == to_high) & (above % 2 == 1))
    return torch.where(is_low, values[above - 1], values[above]).copysign(x) * scale


def quantize(weight: torch.Tensor, scheme: ExpertScheme) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round like a quantizer; return the stored tensors and the weight that they represent."""
    rows, columns = weight.shape
    if scheme.bits == 8:
        scale = weight.abs().amax(-1, keepdim=True) / 448
        values = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, values.float() * scale.float()
    groups = weight.view(rows, -1, scheme.group_size or columns)
    if scheme.zero_points:
        low, high = (edge.clamp(*at) for edge, at in zip(groups.aminmax(dim=-1, keepdim=True), EDGES, strict=True))
        scale = (high - low) / 15
        zero_point = (-8 - low / scale).round().clamp(-8, 7)
    else:
        scale, zero_point = groups.abs().amax(-1, keepdim=True) / 7.5, torch.zeros(())
    values = (groups / scale + zero_point).round().clamp(-8, 7)
    packed = pack_to_int32(values.to(torch.int8).view(rows, columns), num_bits=4).contiguous()
    stored = {"weight_packed": packed, "weight_scale": scale.squeeze(-1)}
    if scheme.zero_points:
        zeros = zero_point.squeeze(-1).to(torch.int8)
        stored["weight_zero_point"] = pack_to_int32(zeros, num_bits=4, packed_dim=0).contiguous()
    return stored, ((values - zero_point) * scale).view(rows, columns)


class RaggedExperts:
    """Random experts of given widths.

    Attributes:
        weights: experts for the reference, ``None`` if the width is 0.
        tensors: ``(tensor, shard, expert)`` to the tensor in the checkpoint.
        holders: under expert parallelism, the rank that holds each expert; tests set it.
    """

    def __init__(
        self,
        widths: Sequence[int],
        hidden: int = 64,
        scheme: ExpertScheme | None = None,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
    ) -> None:
        self.widths, self.hidden, self.scheme = list(widths), hidden, scheme or ExpertScheme()
        self.dtype, self.bias = dtype, bias
        self.holders: list[int] | None = None
        self.tensors: dict[tuple[str, str, int], torch.Tensor] = {}
        self.weights = [self._expert(e, width) if width else None for e, width in enumerate(widths)]

    def _expert(self, expert: int, width: int) -> ExpertWeights:
        shapes = {GATE: (width, self.hidden), UP: (width, self.hidden), DOWN: (self.hidden, width)}
        weights = {shard: self._projection(expert, shard, shape) for shard, shape in shapes.items()}
        biases = [self._bias(expert, shard, shapes[shard][0]) for shard in shapes] if self.bias else []
        return ExpertWeights(weights[GATE], weights[UP], weights[DOWN], *biases)

    def _projection(self, expert: int, shard: str, shape: tuple[int, int]) -> torch.Tensor:
        weight = (torch.randn(shape) / shape[1] ** 0.5).to(self.dtype)
        if self.scheme.bits == 16:
            self.tensors["weight", shard, expert] = weight
            return weight
        stored, rounded = quantize(weight, self.scheme)
        self.tensors |= {(tensor, shard, expert): value for tensor, value in stored.items()}
        if self.scheme.bits == 4:
            self.tensors["weight_shape", shard, expert] = torch.tensor(shape)
        return rounded

    def _bias(self, expert: int, shard: str, rows: int) -> torch.Tensor:
        self.tensors["bias", shard, expert] = bias = torch.randn(rows, dtype=self.dtype)
        return bias

    def of_rank(self, storage: ExpertStorage) -> list[ExpertWeights | None]:
        """The experts for the reference, with the channels that a rank holds."""
        parts: list[ExpertWeights | None] = []
        for number, (expert, (start, stop)) in enumerate(zip(self.weights, storage.ranges_E, strict=True)):
            if expert is None or not storage.is_here_E[number]:
                parts.append(None)
                continue
            gate, up, down, *biases = expert
            held = [gate[start:stop], up[start:stop], down[:, start:stop]]
            if biases[0] is not None:
                held += [biases[0][start:stop], biases[1][start:stop], biases[2] * storage.adds_bias_E[number]]
            parts.append(ExpertWeights(*held))
        return parts

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a projection as the scheme rounds it, for the reference."""
        return float8_values(x.to(self.dtype).double()) if self.scheme.bits == 8 else x.double()

    def storage(self, rank: int = 0, world_size: int = 1) -> tuple[ExpertStorage, torch.nn.Module]:
        """Empty parameters for these experts on one rank, filled with NaN where that is possible."""
        described = "mlp.experts", tuple(PROJECTIONS.values()), self.widths, self.hidden, self.scheme
        storage = ExpertStorage(*described, rank, world_size, self.holders)
        layer: Any = torch.nn.Module()
        layer.is_here_E = storage.is_here_E
        storage.create_parameters(layer, self.dtype, self.bias)
        for name, parameter in layer.named_parameters():
            # down biases of experts on other ranks are not loaded
            if parameter.is_floating_point() and (self.holders is None or name != "w2_bias"):
                parameter.data.fill_(torch.nan)
        return storage, layer

    def loaded(self, rank: int = 0, world_size: int = 1) -> tuple[ExpertStorage, torch.nn.Module]:
        """The experts of one rank with all tensors loaded."""
        storage, layer = self.storage(rank, world_size)
        self.load(layer)
        storage.check_complete()
        return storage, layer

    def load(self, layer: Any, keys: Sequence[tuple[str, str, int]] | None = None) -> None:
        """Pass checkpoint tensors to the loaders, like vLLM."""
        for tensor, shard, expert in self.tensors if keys is None else keys:
            name = f"{'w2' if shard == DOWN else 'w13'}_{tensor}"
            param = getattr(layer, name)
            is_here = layer.is_here_E[expert]
            # a tensor without values cannot be read
            stored = self.tensors[tensor, shard, expert] if is_here else torch.empty(0, device="meta")
            loaded = param.weight_loader(
                param=param,
                loaded_weight=stored,
                weight_name=f"mlp.experts.{name}",
                shard_id=shard,
                expert_id=expert,
                return_success=True,
            )
            assert loaded is is_here
