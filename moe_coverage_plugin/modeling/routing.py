"""The tokens of a batch that each expert of a layer is routed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The routed rows of a batch, one per token and slot of the top-k (``M = T * K``), sorted by expert.

    Row counts stay on the device, because reading them would synchronize with it at every layer.

    Attributes:
        tokens_M: index of the row's token, int64; ascending within an expert and slot.
        routing_weights_M: routing weight of the row's token for the row's expert.
        order_M: the rows by slot, then by token; int64.
        top_k: number of slots.
        lengths_E: number of rows of each expert, int64.
        real_M: indices of the rows whose token is not padding, int64; ``None``: all.
        real_lengths_E: number of such rows of each expert, int64.
    """

    tokens_M: Tensor
    routing_weights_M: Tensor
    order_M: Tensor
    top_k: int
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
        tokens, top_k = topk_ids_TK.shape
        ids_M, places_M = torch.sort(topk_ids_TK.detach().T.reshape(-1), stable=True)
        tokens_M, slots_M = places_M % tokens, places_M // tokens
        rows_M = torch.arange(len(places_M), device=places_M.device)
        order_M = torch.empty_like(places_M).index_copy_(0, places_M, rows_M)
        lengths_E = _count_sorted(ids_M, experts)
        real_M, real_lengths_E = None, lengths_E
        if real_T is not None:
            real_M = real_T.to(tokens_M.device)[tokens_M].nonzero().flatten()
            real_lengths_E = _count_sorted(ids_M[real_M], experts)
        weights_M = topk_weights_TK[tokens_M, slots_M]
        return cls(tokens_M, weights_M, order_M, top_k, lengths_E, real_M, real_lengths_E)

    def real(self, rows_M: Tensor) -> Tensor:
        """Return the rows whose token is not padding, detached."""
        return rows_M.detach() if self.real_M is None else rows_M.detach()[self.real_M]

    def rows(self, values_TH: Tensor) -> Tensor:
        """The values of each row's token, ``[M, H]``."""
        return _Rows.apply(values_TH, self)

    def over_slots(self, rows_MH: Tensor) -> Tensor:
        """Sum rows over the slots of each token, ``[T, H]``, in the same order every time, unlike atomic additions."""
        return _OverSlots.apply(rows_MH, self)

    def by_slot(self, rows_M: Tensor) -> Tensor:
        """Order rows by slot, then by token, ``[K, T, ...]``."""
        # a gather takes a third of the time of a scatter on a GPU
        return rows_M[self.order_M].unflatten(0, (self.top_k, -1))


class _Rows(torch.autograd.Function):
    """:meth:`Routing.rows`; autograd would sort the tokens again to add the gradients of each."""

    @staticmethod
    def forward(ctx: Any, values_TH: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return values_TH[routing.tokens_M]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares any number of gradients
        ctx: Any, grad_MH: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.routing.over_slots(grad_MH), None


class _OverSlots(torch.autograd.Function):
    """:meth:`Routing.over_slots`."""

    @staticmethod
    def forward(ctx: Any, rows_MH: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return routing.by_slot(rows_MH).sum(0)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares any number of gradients
        ctx: Any, grad_TH: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.routing.rows(grad_TH), None


def _count_sorted(ids_M: Tensor, experts: int) -> Tensor:
    """Count each expert; ``torch.bincount`` would synchronize with the device."""
    return torch.searchsorted(ids_M, torch.arange(experts + 1, device=ids_M.device)).diff()
