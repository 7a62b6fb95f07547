"""The tokens of a batch that each expert of a layer is routed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The routed rows of a batch, one per token and slot of the top-k (``M = T * K``), sorted by expert.

    Row counts stay on the device, because reading them would synchronize with it at every layer.

    Attributes:
        tokens_M: index of the row's token, int64; ascending within an expert and slot.
        routing_weights_M: routing weight of the row's token for the row's expert.
        places_M: index of row ``m`` when rows are ordered by slot, then by token; int64.
        lengths_E: number of rows of each expert, int64.
        real_M: indices of the rows whose token is not padding, int64; ``None``: all.
        real_lengths_E: number of such rows of each expert, int64.
    """

    tokens_M: Tensor
    routing_weights_M: Tensor
    places_M: Tensor
    lengths_E: Tensor
    real_M: Tensor | None
    real_lengths_E: Tensor

    @classmethod
    def of(cls, topk_ids_TK: Tensor, topk_weights_TK: Tensor, experts: int, real_T: Tensor | None) -> Routing:
        """Sort the routing of a batch.

        Args:
            topk_ids_TK: experts that the router chose for each token.
            topk_weights_TK: their routing weights.
            experts: number of experts of the layer.
            real_T: bool, tokens that are not padding; ``None``: all.
        """
        tokens = topk_ids_TK.shape[0]
        ids_M, places_M = torch.sort(topk_ids_TK.detach().T.reshape(-1), stable=True)
        tokens_M, slots_M = places_M % tokens, places_M // tokens
        lengths_E = _count_sorted(ids_M, experts)
        real_M, real_lengths_E = None, lengths_E
        if real_T is not None:
            real_M = real_T.to(tokens_M.device)[tokens_M].nonzero().flatten()
            real_lengths_E = _count_sorted(ids_M[real_M], experts)
        return cls(tokens_M, topk_weights_TK[tokens_M, slots_M], places_M, lengths_E, real_M, real_lengths_E)

    def real(self, rows_M: Tensor) -> Tensor:
        """Return the rows whose token is not padding, detached."""
        return rows_M.detach() if self.real_M is None else rows_M.detach()[self.real_M]

    def over_slots(self, rows_M: Tensor, tokens: int) -> Tensor:
        """Sum rows over the slots of each token, ``[T, ...]``, in the same order every time, unlike atomic additions.

        Args:
            rows_M: ``[M, ...]``.
            tokens: number of tokens of the batch.
        """
        return self.by_slot(rows_M, tokens).sum(0)

    def by_slot(self, rows_M: Tensor, tokens: int) -> Tensor:
        """Order rows by slot, then by token, ``[K, T, ...]``; arguments are those of :meth:`over_slots`."""
        return torch.empty_like(rows_M).index_copy_(0, self.places_M, rows_M).unflatten(0, (-1, tokens))


def _count_sorted(ids_M: Tensor, experts: int) -> Tensor:
    """Count each expert; ``torch.bincount`` would synchronize with the device."""
    return torch.searchsorted(ids_M, torch.arange(experts + 1, device=ids_M.device)).diff()
