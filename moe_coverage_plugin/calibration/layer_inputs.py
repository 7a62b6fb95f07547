"""What the experts of one MoE layer get for the whole calibration set.

An expert's tokens are found by the routing, so the inputs are kept once for all experts. Whatever is computed from the
tokens of an expert (a Gram matrix, a fit, a quantization) then exists for a few experts at a time, and matrices of all
experts of a layer are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks, sum_over_ranks
from moe_coverage_plugin.core.gauss_newton import Tokens
from moe_coverage_plugin.modeling.routing import Routing

# experts of a layer whose matrices exist at the same time; a CPU gains nothing from more than one
EXPERTS, EXPERTS_ON_CPU = 32, 1
# tokens of an expert that its matrices are computed from; they have fewer dimensions
ROWS = 16384
# numbers of sampled tokens on a GPU are multiples of it, because its library chooses a kernel for every new shape
MULTIPLE = 256


class ExpertTokens(NamedTuple):
    """Tokens of one expert on this rank, first those that may be fitted, then those that are held back.

    Attributes:
        x_MH: inputs of the expert, or what it computes from them.
        weight_M: routing weights.
        fitted: number of tokens that may be fitted.
    """

    x_MH: Tensor
    weight_M: Tensor
    fitted: int

    def to(self, device: torch.device) -> ExpertTokens:
        """Return these tokens on a device."""
        return ExpertTokens(self.x_MH.to(device), self.weight_M.to(device), self.fitted)

    def sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return values and weights of the tokens to fit, and of those held back."""
        fitted = self.fitted
        return (self.x_MH[:fitted], self.weight_M[:fitted]), (self.x_MH[fitted:], self.weight_M[fitted:])


class LayerInputs:
    """Hidden states and routing of one layer for all batches of this rank, without padding.

    Attributes:
        x_TH: inputs of the experts, where hidden states are stored.
        ids_TK: experts of each token.
        weights_TK: their routing weights.
        held_T: bool, tokens on which what was fitted to the others is tested.
        device: of the experts.
    """

    def __init__(self, experts: int, tokens: int, store: torch.device):
        """Create empty inputs.

        Args:
            experts: number of experts of the layer.
            tokens: of all batches, without padding.
            store: device of the hidden states.
        """
        self._experts, self._tokens, self._store = experts, tokens, store
        self._filled = 0
        self.device = store
        self._routing: Routing | None = None
        # first row of each expert, and its numbers of rows that may be fitted and that are held back
        self._rows: list[tuple[int, int, int]] = []
        self.x_TH = self.ids_TK = self.weights_TK = self.held_T = torch.empty(0)

    @property
    def experts_together(self) -> int:
        """How many experts are computed together where they are."""
        return EXPERTS_ON_CPU if self.device.type == "cpu" else EXPERTS

    def add(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, held_T: Tensor, real_T: Tensor | None) -> None:
        """Add a batch.

        Args:
            x_TH: inputs of the experts.
            ids_TK: experts that the router chose for each token.
            weights_TK: their routing weights.
            held_T: bool, tokens that are held back.
            real_T: bool, tokens that are not padding; ``None``: all.
        """
        if not self._filled:
            self.device = x_TH.device
            self.x_TH = torch.empty(self._tokens, x_TH.shape[1], dtype=x_TH.dtype, device=self._store)
            self.ids_TK = torch.empty(self._tokens, ids_TK.shape[1], dtype=torch.int64, device=self._store)
            self.weights_TK = torch.empty(self._tokens, ids_TK.shape[1], dtype=weights_TK.dtype, device=self._store)
            self.held_T = torch.empty(self._tokens, dtype=torch.bool, device=self._store)
        all_values = (self.x_TH, self.ids_TK, self.weights_TK, self.held_T)
        added = 0
        for values, batch in zip(all_values, (x_TH, ids_TK, weights_TK, held_T), strict=True):
            real = batch.detach() if real_T is None else batch.detach()[real_T.to(batch.device)]
            added = len(real)
            values[self._filled : self._filled + added] = real
        self._filled += added

    def tokens(self, expert: int) -> ExpertTokens:
        """This rank's share of at most :data:`ROWS` tokens of an expert, on the device of the experts."""
        return self._sample(expert, ROWS).to(self.device)

    def count_tokens(self) -> Tensor:
        """Numbers ``[E]`` of tokens that :meth:`tokens` has of each expert on all ranks, int64; collective."""
        counts = [self._count(expert, ROWS) for expert in range(self._experts)]
        return sum_over_ranks({"tokens_E": torch.tensor(counts, dtype=torch.int64)})["tokens_E"]

    def sample(self, experts: Sequence[int], most: int) -> tuple[Tokens, Tokens]:
        """At most about ``most`` tokens of each of some experts, evenly spread over all of all ranks; collective.

        Returns:
            The tokens to fit, and those held back, on the device of the experts.
        """
        samples_D = [self._sample(expert, most) for expert in experts]
        if _ranks() > 1:
            gathered = gather_over_ranks([each.to(torch.device("cpu")) for each in samples_D])
        else:
            gathered = [samples_D]
        fitted, held = zip(*(_joined(each) for each in zip(*gathered, strict=True)), strict=True)
        return _padded(fitted, self.device), _padded(held, self.device)

    def _sample(self, expert: int, most: int) -> ExpertTokens:
        """Tokens of an expert on this rank, evenly spread, where hidden states are stored."""
        routing = self._sorted()
        first, fitted, held = self._rows[expert]
        count, rows = self._count(expert, most), max(fitted + held, 1)
        rows_M = first + torch.arange(count, device=self._store) * rows // max(count, 1)
        # those of the chosen rows ``number * rows // count`` that are below ``fitted``
        return ExpertTokens(
            self.x_TH[routing.tokens_M[rows_M]], routing.routing_weights_M[rows_M], -(-fitted * count // rows)
        )

    def _count(self, expert: int, most: int) -> int:
        self._sorted()
        return min(sum(self._rows[expert][1:]), -(-most // _ranks()))

    def _sorted(self) -> Routing:
        if self._routing is None:
            assert self._filled == self._tokens, f"{self._filled} of {self._tokens} tokens were added"
            # within an expert, those that are held back follow the others, so that each part is a slice
            parts_TK = 2 * self.ids_TK + self.held_T[:, None]
            self._routing = Routing.of(parts_TK, self.weights_TK, 2 * self._experts, None)
            # read once, because each read waits for the device
            self._rows = list(_starts(self._routing.lengths_E.tolist()))
        return self._routing


def _starts(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    first = 0
    for fitted, held in zip(lengths[::2], lengths[1::2], strict=True):
        yield first, fitted, held
        first += fitted + held


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _joined(parts: Sequence[ExpertTokens]) -> list[tuple[Tensor, Tensor]]:
    """Inputs and weights of an expert on all ranks: of the tokens to fit, and of those held back."""
    sides = zip(*(part.sides() for part in parts), strict=True)
    return [(torch.cat([x_MH for x_MH, _ in side]), torch.cat([weight_M for _, weight_M in side])) for side in sides]


def _padded(tokens_D: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tokens:
    """Tokens of several experts, with rows of zeros behind those of experts that have fewer."""
    counts, multiple = [len(weight_M) for _, weight_M in tokens_D], _multiple(device)
    rows = -(-max(counts) // multiple) * multiple
    x_DMH, weight_DM = (_stacked(values_D, rows).to(device) for values_D in zip(*tokens_D, strict=True))
    return Tokens(x_DMH, weight_DM, torch.tensor(counts, device=device))


def _multiple(device: torch.device) -> int:
    return MULTIPLE if device.type == "cuda" else 1


def _stacked(values_D: Sequence[Tensor], rows: int) -> Tensor:
    """Values with as many rows, filled up with zeros."""
    stacked = values_D[0].new_zeros(len(values_D), rows, *values_D[0].shape[1:])
    for part, values in zip(stacked, values_D, strict=True):
        part[: len(values)] = values
    return stacked
