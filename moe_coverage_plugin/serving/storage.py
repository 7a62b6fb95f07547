"""Experts of unequal width in memory: flat tensors that hold all matrices one after another, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Literal

import torch

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.parallelism import rank_ranges
from moe_coverage_plugin.serving.float8 import FLOAT8
from moe_coverage_plugin.serving.packing import NIBBLES, packed_columns
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights

Part = Literal["w13", "w2"]
"""vLLM's names of the two tensors of an expert: ``gate_proj`` above ``up_proj``, and ``down_proj``."""

GATE: str = "w1"
UP: str = "w3"
DOWN: str = "w2"
"""vLLM's names of the projections, with which it calls a loader."""

ZERO_POINT = "weight_zero_point"
OF_GROUPS = ("weight_scale", ZERO_POINT)
NAMES_IN_MESSAGE = 4


@dataclass(frozen=True)
class ExpertShapes:
    """Shapes of the matrices of a layer's experts, which have ``N`` channels each, and hidden size ``H``.

    A flat tensor holds one kind of matrix of all experts: ``w13`` ``[2 N, columns(H)]`` or ``w2`` ``[H, columns(N)]``.
    One column holds one input channel of ``weight``, eight of ``weight_packed``, a group of ``weight_scale`` and
    ``weight_zero_point``, and all of ``bias``. One row holds one output channel, except that a row of
    ``weight_zero_point`` holds eight; gate and up have rows of their own.

    Attributes:
        widths_E: ``N`` of each expert.
        hidden: ``H``.
        scheme: how the weights are stored.
    """

    widths_E: tuple[int, ...]
    hidden: int
    scheme: ExpertScheme

    def columns(self, tensor: str, channels: int) -> int:
        """Return the number of columns that hold ``channels`` input channels."""
        if tensor == "weight_packed":
            return packed_columns(channels)
        if tensor in OF_GROUPS and self.scheme.group_size:
            return channels // self.scheme.group_size
        return channels if tensor == "weight" else 1

    def shape(self, part: Part, tensor: str, expert: int) -> tuple[int, int]:
        """Return the shape of one expert's matrix; a removed expert has only a down bias, of zeros."""
        width = self.widths_E[expert]
        if part == "w13":
            return 2 * self.rows(tensor, width), self.columns(tensor, self.hidden)
        columns = 0 if width == 0 and tensor != "bias" else self.columns(tensor, width)
        return self.rows(tensor, self.hidden), columns

    @staticmethod
    def rows(tensor: str, channels: int) -> int:
        """Return the number of rows that hold ``channels`` output channels."""
        return packed_columns(channels) if tensor == ZERO_POINT else channels

    def matrix(self, flat: torch.Tensor, part: Part, tensor: str, expert: int) -> torch.Tensor:
        """Return one expert's matrix, a view of the flat tensor."""
        start, stop = _spans(self, part, tensor)[expert]
        return flat[start:stop].view(self.shape(part, tensor, expert))

    def numel(self, part: Part, tensor: str) -> int:
        """Return the number of elements of the flat tensor."""
        return _spans(self, part, tensor)[-1][1]


@cache
def _spans(shapes: ExpertShapes, part: Part, tensor: str) -> list[tuple[int, int]]:
    """Return start and stop of every expert's matrix in the flat tensor."""
    sizes = (rows * columns for rows, columns in (shapes.shape(part, tensor, e) for e in range(len(shapes.widths_E))))
    return list(pairwise(accumulate(sizes, initial=0)))


class ExpertStorage:
    """The parameters of one layer's experts on one rank, and a loader that accepts each tensor once.

    Args:
        name: module path of the experts in the checkpoint, for messages.
        projections: checkpoint names of gate, up and down.
        widths_E: channels of every expert in the checkpoint; an expert of width 0 has no tensors there.
        hidden: hidden size.
        scheme: how the checkpoint stores the weights.
        rank: number of this rank among the ranks that share the channels of every expert.
        world_size: number of these ranks.
        holders_E: under expert parallelism, the rank that holds each expert, entire; ranks share no expert then.

    Attributes:
        is_here_E: whether this rank holds each expert, or a part of it.
        adds_bias_E: whether this rank adds the down bias of each expert; only one rank does, as outputs are summed.
        ranges_E: channels ``[start, stop)`` of every expert that this rank holds.
        stored: shapes in the checkpoint.
        local: shapes on this rank.

    Raises:
        CoverageError: the hidden size is not a multiple of the quantization group size.
    """

    def __init__(
        self,
        name: str,
        projections: Sequence[str],
        widths_E: Sequence[int],
        hidden: int,
        scheme: ExpertScheme,
        rank: int = 0,
        world_size: int = 1,
        holders_E: Sequence[int] | None = None,
    ) -> None:
        if scheme.group_size and hidden % scheme.group_size:
            raise CoverageError(
                f"{name} has hidden size {hidden}, which is not a multiple of the quantization group size "
                f"{scheme.group_size}: quantize with a group size that divides it"
            )
        self.name, self.rank = name, rank
        self.projections = dict(zip((GATE, UP, DOWN), projections, strict=True))
        self.is_here_E = [holder == rank for holder in holders_E or [rank] * len(widths_E)]
        if holders_E is None:
            self.adds_bias_E = [rank == 0] * len(widths_E)
            self.ranges_E = rank_ranges(widths_E, scheme.shard_unit, rank, world_size)
        else:
            self.adds_bias_E = self.is_here_E
            # of an expert that is elsewhere, this rank has no channel, so that it adds nothing to outputs
            self.ranges_E = [(0, width * is_here) for width, is_here in zip(widths_E, self.is_here_E, strict=True)]
        self.stored = ExpertShapes(tuple(widths_E), hidden, scheme)
        self.local = ExpertShapes(tuple(stop - start for start, stop in self.ranges_E), hidden, scheme)
        self._expected: set[tuple[str, str, int]] = set()
        self._loaded: set[tuple[str, str, int]] = set()

    def create_parameters(self, layer: torch.nn.Module, dtype: torch.dtype, has_bias: bool) -> None:
        """Register flat parameters on ``layer`` under vLLM's names: ``w13_weight``, ``w2_weight_packed`` and so on.

        Args:
            layer: the module that vLLM loads into.
            dtype: of plain weights, scales and biases.
            has_bias: whether the projections have biases.
        """
        dtypes = {"weight": dtype}
        if self.stored.scheme.bits == 8:
            dtypes = {"weight": FLOAT8, "weight_scale": dtype}
        if self.stored.scheme.bits == 4:
            # stored shapes are compared with the widths when they are loaded, so their parameters stay empty
            dtypes = {"weight_packed": torch.int32, "weight_scale": dtype, "weight_shape": torch.int64}
        if self.stored.scheme.zero_points:
            dtypes[ZERO_POINT] = torch.int32
        if has_bias:
            dtypes["bias"] = dtype
        kept = [e for e, width in enumerate(self.stored.widths_E) if width and self.is_here_E[e]]
        parts: tuple[tuple[Part, tuple[str, ...]], ...] = (("w13", (GATE, UP)), ("w2", (DOWN,)))
        for tensor, tensor_dtype in dtypes.items():
            for part, shards in parts:
                numel = 0 if tensor == "weight_shape" else self.local.numel(part, tensor)
                parameter = torch.nn.Parameter(torch.zeros(numel, dtype=tensor_dtype), requires_grad=False)
                parameter.weight_loader = partial(self.load, tensor)  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's protocol
                layer.register_parameter(f"{part}_{tensor}", parameter)
                self._expected |= {(tensor, shard, expert) for shard in shards for expert in kept}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all parameters that a layer may have, in the order of ``RaggedWeights``."""
        tensor = "weight_packed" if self.stored.scheme.bits == 4 else "weight"
        return tuple(
            f"{part}_{kind}" for kind in (tensor, "weight_scale", "bias", ZERO_POINT) for part in ("w13", "w2")
        )

    def parameters(self, layer: torch.nn.Module) -> RaggedWeights:
        """Return the parameters of a layer, with ``None`` for those that it does not have."""
        return RaggedWeights(*(getattr(layer, name, None) for name in self.parameter_names))

    def load(
        self,
        tensor: str,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,  # noqa: ARG002  # vLLM's signature
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's part of one checkpoint tensor; vLLM calls this as the parameter's ``weight_loader``.

        Args:
            tensor: kind of the tensor, ``weight_packed``.
            param: the parameter to fill.
            loaded_weight: the tensor in the checkpoint.
            weight_name: vLLM's name of the parameter, which is not read.
            shard_id: ``GATE``, ``UP`` or ``DOWN``.
            expert_id: number of the expert.
            return_success: whether vLLM requests a result.

        Returns:
            If a result is requested, whether this rank holds the expert. Otherwise the tensor is not read.

        Raises:
            CoverageError: the shape does not match the widths, or the tensor was loaded before.
        """
        if not self.is_here_E[expert_id]:
            return False if return_success else None
        key = (tensor, shard_id, expert_id)
        if key in self._loaded:
            raise CoverageError(f"{self._path(key)} is in the checkpoint more than once: save the model again")
        expected = self._stored_shape(tensor, shard_id, expert_id)
        found = tuple(loaded_weight.tolist()) if tensor == "weight_shape" else tuple(loaded_weight.shape)
        if found != expected:
            raise CoverageError(
                f"{self._path(key)} has shape {list(found)}, expected {list(expected)} at width "
                f"{self.stored.widths_E[expert_id]}: tensors and widths belong to different checkpoints, save the "
                "model again"
            )
        if tensor != "weight_shape":
            part = self._part_of_rank(loaded_weight, tensor, shard_id, expert_id)
            self._matrix(param.data, tensor, shard_id, expert_id).copy_(part)
        self._loaded.add(key)
        return True if return_success else None

    def replace_parameter(self, layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Replace a loaded parameter by one in another layout, which cannot be loaded into.

        Args:
            layer: the module that holds the parameters.
            name: one of ``parameter_names``.
            tensor: value of the new parameter.
        """

        def stop_loading(*_: object, **__: object) -> None:
            raise CoverageError(
                f"the experts of {self.name} were rearranged for the kernels and cannot be loaded again: start "
                "another engine for another checkpoint"
            )

        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        parameter.weight_loader = stop_loading  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's protocol
        layer.register_parameter(name, parameter)

    def check_complete(self) -> None:
        """Check that every tensor was loaded.

        Raises:
            CoverageError: tensors are missing; the message names the first ones.
        """
        missing = sorted(self._expected - self._loaded, key=lambda key: (key[2], key[1], key[0]))
        if missing:
            names = ", ".join(self._path(key) for key in missing[:NAMES_IN_MESSAGE])
            more = f" and {len(missing) - NAMES_IN_MESSAGE} more" if len(missing) > NAMES_IN_MESSAGE else ""
            raise CoverageError(
                f"{len(missing)} of {len(self._expected)} tensors of {self.name} are not in the checkpoint "
                f"({names}{more}): copy the checkpoint again, or save the model again"
            )
        self._loaded.clear()

    def _stored_shape(self, tensor: str, shard_id: str, expert: int) -> tuple[int, ...]:
        width, hidden = self.stored.widths_E[expert], self.stored.hidden
        rows, channels = (hidden, width) if shard_id == DOWN else (width, hidden)
        if tensor == "bias":
            return (rows,)
        if tensor == "weight_shape":
            return rows, channels
        return self.stored.rows(tensor, rows), self.stored.columns(tensor, channels)

    def _matrix(self, flat: torch.Tensor, tensor: str, shard_id: str, expert: int) -> torch.Tensor:
        if shard_id == DOWN:
            return self.local.matrix(flat, "w2", tensor, expert)
        gate_up = self.local.matrix(flat, "w13", tensor, expert)
        rows = self.local.rows(tensor, self.local.widths_E[expert])
        return gate_up[:rows] if shard_id == GATE else gate_up[rows:]

    def _part_of_rank(self, stored: torch.Tensor, tensor: str, shard_id: str, expert: int) -> torch.Tensor:
        start, stop = self.ranges_E[expert]
        if tensor == "bias":
            stored = stored if shard_id != DOWN or self.adds_bias_E[expert] else torch.zeros_like(stored)
            stored = stored.unsqueeze(-1)
        if shard_id != DOWN:
            # the channels of a rank begin with the first row of a word
            first = start // NIBBLES if tensor == ZERO_POINT else start
            return stored[first : first + self.local.rows(tensor, stop - start)]
        columns = self.local.shape("w2", tensor, expert)[1]
        one_for_all = tensor == "bias" or (tensor in OF_GROUPS and self.stored.scheme.group_size is None)
        first = 0 if one_for_all else self.stored.columns(tensor, start)
        return stored[:, first : first + columns]

    def _path(self, key: tuple[str, str, int]) -> str:
        tensor, shard_id, expert = key
        return f"{self.name}.{expert}.{self.projections[shard_id]}.{tensor}"
