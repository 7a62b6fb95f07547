"""Next-token loss without padding and masked prompts, and its gradient: what importance is measured by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from compressed_tensors.offload import get_execution_device
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.manifest import CoverageError

IGNORED = -100
# tokens whose logits are converted to float32 at a time
CHUNK_POSITIONS = 2048


class LossGradient(NamedTuple):
    """The summed loss of a batch and its gradient.

    Attributes:
        loss: float64 scalar, nats.
        tokens: number of predicted tokens.
        logits_grad_BSV: ``dloss/dlogits`` in the dtype of the logits; zero at positions that predict nothing.
    """

    loss: Tensor
    tokens: int
    logits_grad_BSV: Tensor


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Token ids and attention mask of a batch, on the device that the model computes on."""
    device = get_execution_device(model)
    return {key: batch[key].to(device) for key in ("input_ids", "attention_mask") if batch.get(key) is not None}


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """``[B, S]`` int64: the token after each position, ``-100`` if it does not count.

    These do not count: padding, tokens after padding on the left, the position after the last, and, if the batch has
    ``labels``, tokens whose label is ``-100`` (a prompt, for instance).
    """
    labels = batch.get("labels")
    target_BS = (batch["input_ids"] if labels is None else labels).long()
    next_BS = torch.nn.functional.pad(target_BS[:, 1:], (0, 1), value=IGNORED)
    if (mask_BS := batch.get("attention_mask")) is not None:
        real_BS = mask_BS.bool().to(next_BS.device)
        next_BS[:, :-1].masked_fill_(~(real_BS[:, :-1] & real_BS[:, 1:]), IGNORED)
    return next_BS


@torch.no_grad()
def drawn_tokens(logits_BSV: Tensor, targets_BS: Tensor, generator: torch.Generator) -> Tensor:
    """``[B, S]`` int64: tokens drawn from ``softmax(logits)`` at positions whose target counts, ``-100`` at others.

    Gradients of their loss have the curvature of the true Fisher information as their second moment, those of given
    tokens that of the empirical one.

    Args:
        logits_BSV: of the model.
        targets_BS: :func:`next_tokens`.
        generator: on the device of the logits.
    """
    logits_TV, targets_T = logits_BSV.detach().flatten(0, 1), targets_BS.to(logits_BSV.device).flatten()
    drawn_T = torch.full_like(targets_T, IGNORED)
    for chunk in (targets_T != IGNORED).nonzero().flatten().split(CHUNK_POSITIONS):
        probs = torch.softmax(logits_TV[chunk].to(torch.promote_types(logits_TV.dtype, torch.float32)), -1)
        drawn_T[chunk] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return drawn_T.view_as(targets_BS)


def check_predicted(batches: Iterable[Mapping[str, Tensor]], which: str, measured: str) -> None:
    """Check that the batches of any rank have a token to predict.

    Args:
        batches: model inputs.
        which: noun phrase for the batches, for the message.
        measured: the options that need the loss, for the message.

    Raises:
        CoverageError: no token is predicted on any rank; raised on all ranks.
    """
    predicted = sum(int((next_tokens(batch) != IGNORED).sum()) for batch in batches)
    if not any(gather_over_ranks(predicted)):
        raise CoverageError(
            f"{which} have no token for the model to predict, so {measured} would measure nothing: pass samples of at "
            "least two tokens without padding, not all with label -100, or choose options that need no loss "
            "(channel_metric='activation', expert_importance='first_order', layer_noise=None)"
        )


def next_token_loss(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of the next-token losses of a batch (float64 scalar, nats) and their number."""
    logits_BSV = model(**model_inputs(model, batch)).logits
    targets_BS = next_tokens(batch).to(logits_BSV.device)
    losses = cross_entropy(
        logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.double().sum(), int((targets_BS != IGNORED).sum())


def check_loss(loss: Tensor) -> None:
    """Check that a loss is finite.

    Raises:
        CoverageError: it is NaN or infinite.
    """
    if not bool(torch.isfinite(loss)):
        raise CoverageError(
            f"the model's loss on the calibration set is {float(loss)}: check its weights, and calibrate in a dtype "
            "with enough range (bfloat16 rather than float16)"
        )


@torch.no_grad()
def loss_gradient(logits_BSV: Tensor, targets_BS: Tensor) -> LossGradient:
    """Loss and its gradient ``softmax(logits) - one_hot(target)``, computed in chunks.

    Logits of a whole batch in float32 would not fit.
    """
    logits_TV, targets_T = logits_BSV.detach().flatten(0, 1), targets_BS.to(logits_BSV.device).flatten()
    grad_TV = torch.zeros_like(logits_TV)
    loss = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
    predicted_T = (targets_T != IGNORED).nonzero().flatten()
    for chunk in predicted_T.split(CHUNK_POSITIONS):
        log_probs = torch.log_softmax(logits_TV[chunk].to(torch.promote_types(logits_TV.dtype, torch.float32)), -1)
        target = targets_T[chunk, None]
        loss -= log_probs.gather(-1, target).double().sum()
        probs = log_probs.exp_()
        probs.scatter_add_(-1, target, -torch.ones_like(target, dtype=probs.dtype))
        grad_TV[chunk] = probs.to(grad_TV.dtype)
    return LossGradient(loss, predicted_T.numel(), grad_TV.reshape(logits_BSV.shape))
