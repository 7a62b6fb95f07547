"""What the experts of one MoE layer get for the whole calibration set.

An expert's tokens are found by the routing, so the inputs are kept once for all experts. Whatever is computed from the
tokens of an expert (a Gram matrix, a fit, a quantization) then exists for a few experts at a time, and matrices of all
experts of a layer are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks, sum_over_ranks
from moe_coverage_plugin.core.refit import Tokens
from moe_coverage_plugin.modeling.routing import Routing

# experts of a layer whose matrices exist at the same time
EXPERTS = 32
# rows of an expert that are computed together
ROWS = 16384


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
        self._lengths: list[int] = []
        self.x_TH = self.ids_TK = self.weights_TK = self.held_T = torch.empty(0)

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

    def parts(self, expert: int) -> Iterator[Tokens]:
        """The tokens of an expert on this rank, at most :data:`ROWS` at a time, on the device of the experts."""
        for rows_M in self._rows(expert).split(ROWS):
            yield _moved(self._tokens_of(rows_M), self.device)

    def sample(self, expert: int, most: int) -> Tokens | None:
        """At most about ``most`` tokens of an expert, evenly spread over all of all ranks; collective.

        Returns:
            ``None`` if no rank has a token.
        """
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        rows_M = self._rows(expert)
        count = min(len(rows_M), -(-most // ranks))
        tokens = self._tokens_of(rows_M[torch.arange(count, device=self._store) * len(rows_M) // max(count, 1)])
        if ranks > 1:
            gathered = gather_over_ranks(_moved(tokens, torch.device("cpu")))
            tokens = Tokens(*(torch.cat(each) for each in zip(*gathered, strict=True)))
        return _moved(tokens, self.device) if len(tokens.x_MH) else None

    def count_tokens(self) -> Tensor:
        """Tokens ``[E]`` of each expert on all ranks, int64 on the CPU; collective."""
        self._sorted()
        return sum_over_ranks({"tokens_E": torch.tensor(self._lengths, dtype=torch.int64)})["tokens_E"]

    def _sorted(self) -> Routing:
        if self._routing is None:
            assert self._filled == self._tokens, f"{self._filled} of {self._tokens} tokens were added"
            self._routing = Routing.of(self.ids_TK, self.weights_TK, self._experts, None)
            # read once, because each read waits for the device
            self._lengths = self._routing.lengths_E.tolist()
        return self._routing

    def _rows(self, expert: int) -> Tensor:
        self._sorted()
        first = sum(self._lengths[:expert])
        return torch.arange(first, first + self._lengths[expert], device=self._store)

    def _tokens_of(self, rows_M: Tensor) -> Tokens:
        routing = self._sorted()
        tokens_M = routing.tokens_M[rows_M]
        return Tokens(self.x_TH[tokens_M], routing.routing_weights_M[rows_M], self.held_T[tokens_M])


def _moved(tokens: Tokens, device: torch.device) -> Tokens:
    return Tokens(*(each.to(device) for each in tokens))
