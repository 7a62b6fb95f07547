"""Layer importance: how much the model's loss rises when the output of one MoE layer fades."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import get_execution_device
from llmcompressor.utils.helpers import disable_cache, eval_context
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock
from moe_coverage_plugin.manifest import CoverageError


@torch.no_grad()
def layer_loss_rise(
    model: PreTrainedModel, blocks: Sequence[ExpertBlock], batches: Sequence[Mapping[str, Tensor]], noise: float
) -> Tensor:
    """Rise of the mean next-token loss when the output of each MoE layer is scaled by ``1 - noise`` (paper, ALA).

    Costs one forward pass over ``batches`` for every layer and one more.

    Args:
        batches: model inputs with ``input_ids`` and, where padded, ``attention_mask``.
        noise: in (0, 1]; 1 removes the layer's output.

    Returns:
        ``rise_L`` float64, in nats per token; negative where a faded layer helps.

    Raises:
        CoverageError: the loss is not finite.
    """
    progress = tqdm(total=(len(blocks) + 1) * len(batches), desc="Layer importance")

    def mean_loss() -> Tensor:
        loss, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            batch_loss, batch_tokens = next_token_loss(model, batch)
            loss, tokens = loss + batch_loss.cpu(), tokens + batch_tokens
            progress.update()
        if not torch.isfinite(loss):
            raise CoverageError("the model's loss on the calibration set is NaN or infinite: check dtype and weights")
        return loss / max(tokens, 1)

    with progress, disable_cache(model), eval_context(model):
        base = mean_loss()
        faded = []
        for block in blocks:
            with _scaled_output(block.moe, 1.0 - noise):
                faded.append(mean_loss())
    return torch.stack(faded) - base


def next_token_loss(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of the next-token losses of a batch (float64 scalar, nats) and how many there are; padding is left out."""
    device = get_execution_device(model)
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask") if batch.get(key) is not None}
    logits = model(**inputs).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:].to(logits.device)
    if (mask := inputs.get("attention_mask")) is not None:
        targets = targets.masked_fill(~mask[:, 1:].bool().to(targets.device), -100)
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    return losses.double().sum(), int((targets != -100).sum())


@contextmanager
def _scaled_output(module: Module, scale: float) -> Iterator[None]:
    def hook(_module: Module, _args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]):
        return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
