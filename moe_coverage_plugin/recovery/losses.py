"""What is minimised: next-token loss, divergence from a teacher, and unequal load of experts."""

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
        nll, divergence: float64 scalars, nats; the divergence is zero without a teacher.
        gradient_BSV: of what is minimised, by the logits, in their dtype.
    """

    nll: Tensor
    divergence: Tensor
    gradient_BSV: Tensor


def batch_loss(
    logits_BSV: Tensor, ids_BS: Tensor, teacher_BSV: Tensor | None, options: RecoveryOptions, scale: float
) -> BatchLoss:
    """Next-token loss and, with a teacher, its share of divergence from it.

    Args:
        teacher_BSV: logits of the teacher.
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
    """``T^2 KL(teacher || student)`` of logits over ``T``, summed where a token follows, and its gradient."""
    student_TV, teacher_TV = logits_BSV.detach().flatten(0, 1), teacher_BSV.flatten(0, 1)
    gradient_TV = torch.zeros_like(student_TV)
    total = torch.zeros((), dtype=torch.float64, device=student_TV.device)
    positions_T = (targets_BS.to(student_TV.device).flatten() != IGNORED).nonzero().flatten()
    # in pieces: float32 logits of a whole batch would not fit
    for chunk in positions_T.split(CHUNK_POSITIONS):
        student = torch.log_softmax(student_TV[chunk].float() / temperature, -1)
        teacher = torch.log_softmax(teacher_TV[chunk].float() / temperature, -1)
        total += temperature**2 * (teacher.exp() * (teacher - student)).double().sum()
        gradient_TV[chunk] = (temperature * (student.exp() - teacher.exp())).to(gradient_TV.dtype)
    return total, gradient_TV.reshape(logits_BSV.shape)


class LoadBalance:
    """The auxiliary loss of Switch Transformers over the experts that are left: ``E sum_e f_e P_e``, mean over layers.

    ``f_e`` is the share of tokens that chose expert ``e``, ``P_e`` its mean probability among those that are left. At
    least the top-k; equal to it for even load.
    """

    def __init__(self, layers: Sequence[MoELayer]):
        self.layers = [layer for layer in layers if router_module(layer) is not None]
        self._terms: dict[str, Tensor] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """While the context lasts every forward pass with gradients leaves its terms."""
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
        live_E = torch.tensor([width > 0 for width in layer.widths], device=logits_TE.device)
        chance_E = logits_TE.masked_fill(~live_E, float("-inf")).softmax(-1).mean(0)
        chosen_E = torch.zeros_like(chance_E).index_add(
            0, ids_TK.flatten(), chance_E.new_full((ids_TK.numel(),), 1 / len(ids_TK))
        )
        # a backward pass that computes activations anew must come by here again, but its term is not needed
        self._terms.setdefault(layer.name, live_E.sum() * (chosen_E.detach() * chance_E).sum())

    def loss(self) -> Tensor:
        """The loss of the last forward pass; its terms are kept until :meth:`forget`."""
        return torch.stack(list(self._terms.values())).mean()

    def forget(self) -> None:
        """After the backward pass."""
        self._terms.clear()
