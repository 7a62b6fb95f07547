"""Which tokens of a batch each expert of a layer answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """A row for every token and each of its ``K`` experts, ``M = T * K``, those of one expert together.

    Numbers of rows stay on the device: to ask for them would stop it at every layer.

    Attributes:
        tokens_M: index of the token, int64; ascending inside an expert and a slot of the top-k.
        routing_weights_M: its routing weight for the expert.
        places_M: where row ``m`` stands when rows are ordered by slot of the top-k, then by token.
        lengths_E: rows of each expert, int64.
        real_N: the rows whose token is no padding; ``None``: all.
        real_lengths_E: how many of them each expert has.
    """

    tokens_M: Tensor
    routing_weights_M: Tensor
    places_M: Tensor
    lengths_E: Tensor
    real_N: Tensor | None
    real_lengths_E: Tensor

    @classmethod
    def of(cls, topk_ids_TK: Tensor, topk_weights_TK: Tensor, experts: int, real_T: Tensor | None) -> Routing:
        """Sort what a router hands to the experts.

        Args:
            real_T: bool, tokens that are no padding; ``None``: all.
        """
        tokens = topk_ids_TK.shape[0]
        ids_M, places_M = torch.sort(topk_ids_TK.detach().T.reshape(-1), stable=True)
        tokens_M, slots_M = places_M % tokens, places_M // tokens
        lengths_E = _count_sorted(ids_M, experts)
        real_N, real_lengths_E = None, lengths_E
        if real_T is not None:
            real_N = real_T.to(tokens_M.device)[tokens_M].nonzero().flatten()
            real_lengths_E = _count_sorted(ids_M[real_N], experts)
        return cls(tokens_M, topk_weights_TK[tokens_M, slots_M], places_M, lengths_E, real_N, real_lengths_E)

    def real(self, rows_M: Tensor) -> Tensor:
        """The rows that are no padding, without gradient."""
        return rows_M.detach() if self.real_N is None else rows_M.detach()[self.real_N]


def _count_sorted(ids_M: Tensor, experts: int) -> Tensor:
    """How often each expert occurs; ``torch.bincount`` would wait for the device."""
    return torch.searchsorted(ids_M, torch.arange(experts + 1, device=ids_M.device)).diff()
