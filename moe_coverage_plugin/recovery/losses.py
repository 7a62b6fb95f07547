"""Training losses: next-token loss, divergence from a teacher, and load balance of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear

from moe_coverage_plugin.calibration.next_token import CHUNK_POSITIONS, IGNORED, loss_gradient, next_tokens
from moe_coverage_plugin.modeling.moe_layers import MoELayer
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import router_module


class BatchLoss(NamedTuple):
    """Sums over the predicted tokens of a batch.

    Attributes:
        nll: next-token loss, a float64 scalar in nats.
        divergence: divergence from the teacher, a float64 scalar in nats; zero without a teacher.
        gradient_BSV: gradient of the scaled sum of both with respect to the logits, in their dtype.
    """

    nll: Tensor
    divergence: Tensor
    gradient_BSV: Tensor


def batch_loss(
    logits_BSV: Tensor, ids_BS: Tensor, teacher_BSV: Tensor | None, options: RecoveryOptions, scale: float
) -> BatchLoss:
    """Compute the next-token loss, the divergence from the teacher, and the gradient of their weighted sum.

    The sum is ``(1 - distill) * nll + distill * divergence`` with a teacher, and ``nll`` without.

    Args:
        logits_BSV: logits of the model.
        ids_BS: token ids.
        teacher_BSV: logits of the teacher, if there is one.
        options: has ``distill`` and ``temperature``.
        scale: factor of the gradient.
    """
    targets_BS = next_tokens({"input_ids": ids_BS})
    by_tokens = loss_gradient(logits_BSV, targets_BS)
    nll, gradient = by_tokens.loss, by_tokens.logits_grad_BSV
    if teacher_BSV is None:
        return BatchLoss(nll, torch.zeros_like(nll), gradient.mul_(scale))
    divergence, pull = _divergence(logits_BSV, teacher_BSV, targets_BS, options.temperature)
    gradient.mul_(scale * (1 - options.distill)).add_(pull, alpha=scale * options.distill)
    return BatchLoss(nll, divergence, gradient)


@torch.no_grad()
def _divergence(
    logits_BSV: Tensor, teacher_BSV: Tensor, targets_BS: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return ``T^2 KL(teacher || student)`` of logits divided by ``T``, and its gradient.

    Summed over the positions that predict a token. Source: arXiv 1503.02531, section 2.
    """
    student_TV, teacher_TV = logits_BSV.detach().flatten(0, 1), teacher_BSV.flatten(0, 1)
    gradient_TV = torch.zeros_like(student_TV)
    total = torch.zeros((), dtype=torch.float64, device=student_TV.device)
    positions_T = (targets_BS.to(student_TV.device).flatten() != IGNORED).nonzero().flatten()
    # in chunks, because float32 logits of a batch do not fit into memory
    for chunk in positions_T.split(CHUNK_POSITIONS):
        student = torch.log_softmax(student_TV[chunk].float() / temperature, -1)
        teacher = torch.log_softmax(teacher_TV[chunk].float() / temperature, -1)
        total += temperature**2 * (teacher.exp() * (teacher - student)).double().sum()
        gradient_TV[chunk] = (temperature * (student.exp() - teacher.exp())).to(gradient_TV.dtype)
    return total, gradient_TV.reshape(logits_BSV.shape)


class LoadBalance:
    """Auxiliary loss of Switch Transformers over the kept experts: ``E sum_e f_e P_e``, mean over layers.

    ``f_e`` is the fraction of tokens that are routed to expert ``e``, ``P_e`` the mean routing probability of ``e``
    among the kept experts (arXiv 2101.03961, equation 4, with top-k routing). Even load gives ``k``.
    """

    def __init__(self, layers: Sequence[MoELayer]):
        self.layers = [layer for layer in layers if router_module(layer) is not None]
        self._terms: dict[str, Tensor] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Record the terms of every forward pass with gradients inside the context."""
        with ExitStack() as stack:
            for layer in self.layers:
                handle = layer.experts.register_forward_pre_hook(partial(self._observe, layer))
                stack.callback(handle.remove)
            yield

    def _observe(self, layer: MoELayer, _experts: Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        hidden_TH, ids_TK = args[:2]
        router = router_module(layer)
        bias = getattr(router, "bias", None)
        logits_TE = linear(hidden_TH.float(), router.weight.float(), None if bias is None else bias.float())
        kept_E = torch.tensor([width > 0 for width in layer.widths], device=logits_TE.device)
        probability_E = logits_TE.masked_fill(~kept_E, float("-inf")).softmax(-1).mean(0)
        fraction_E = torch.zeros_like(probability_E).index_add(
            0, ids_TK.flatten(), probability_E.new_full((ids_TK.numel(),), 1 / len(ids_TK))
        )
        # activation checkpointing runs this a second time in the backward pass; that term is not needed
        self._terms.setdefault(layer.name, kept_E.sum() * (fraction_E.detach() * probability_E).sum())

    def loss(self) -> Tensor:
        """Return the loss of the last forward pass, a float32 scalar; :meth:`clear` must follow the backward pass."""
        return torch.stack(list(self._terms.values())).mean()

    def clear(self) -> None:
        """Remove the terms, after the backward pass."""
        self._terms.clear()
