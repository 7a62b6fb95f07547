"""Layer importance: how much the model's loss rises when the output of one MoE layer fades."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from compressed_tensors.offload import get_execution_device
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import context as all_experts
from llmcompressor.utils.helpers import disable_cache, eval_context
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock, projections
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
        CoverageError: the loss is not finite; names the first expert whose activations are not.
    """
    progress = tqdm(total=(len(blocks) + 1) * len(batches), desc="Layer importance")

    def mean_loss() -> Tensor:
        sums = {"loss": torch.zeros((), dtype=torch.float64), "tokens": torch.zeros((), dtype=torch.float64)}
        for batch in batches:
            batch_loss, batch_tokens = next_token_loss(model, batch)
            if not torch.isfinite(batch_loss):
                _refuse_batch(model, blocks, batch)
            sums["loss"] += batch_loss.cpu()
            sums["tokens"] += batch_tokens
            progress.update()
        sums = sum_over_ranks(sums)
        return sums["loss"] / sums["tokens"].clamp(min=1)

    # an all-experts pass would compute what no loss depends on
    routed_only = patch_attr(all_experts, "_CALIBRATE_ALL_EXPERTS", False)
    with progress, disable_cache(model), eval_context(model), routed_only:
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


def _refuse_batch(model: PreTrainedModel, blocks: Sequence[ExpertBlock], batch: Mapping[str, Tensor]) -> NoReturn:
    """Name the first expert, in the order of computation, that answers a batch with NaN or infinity."""
    bad: list[str] = []

    def hook(culprit: str, _module: Module, _args: tuple[Any, ...], z: Tensor) -> None:
        if not bool(torch.isfinite(z).all()):
            bad.append(culprit)

    with ExitStack() as hooks:
        for block in blocks:
            for index, mlp in enumerate(block.mlps):
                for linear in projections(mlp).values():
                    handle = linear.register_forward_hook(partial(hook, f"{block.name} expert {index}"))
                    hooks.callback(handle.remove)
        next_token_loss(model, batch)
    if bad:
        raise non_finite_activations(bad[0])
    raise CoverageError("the model's loss on the calibration set is NaN or infinite: check dtype and weights")


def non_finite_activations(culprit: str) -> CoverageError:
    """The refusal of an expert whose activations are no numbers."""
    return CoverageError(
        f"{culprit} has NaN or infinite activations on the calibration set: check its weights, and calibrate in a "
        "dtype with enough range (bfloat16 rather than float16)"
    )


@contextmanager
def _scaled_output(module: Module, scale: float) -> Iterator[None]:
    def hook(_module: Module, _args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]):
        return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
