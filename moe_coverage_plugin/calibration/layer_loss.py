"""Layer importance: the rise of the model's loss when the output of one MoE layer is scaled down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from llmcompressor.utils.helpers import disable_cache, eval_context
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.job_bar import with_progress
from moe_coverage_plugin.calibration.next_token import check_loss, next_token_loss
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import grouped_experts
from moe_coverage_plugin.modeling.moe_layers import MoELayer

# of the pass
TITLE = "Layer importance"


@torch.no_grad()
def layer_loss_rise(
    model: PreTrainedModel, layers: Sequence[MoELayer], batches: Sequence[Mapping[str, Tensor]], noise: float
) -> Tensor:
    """Measure the rise of the mean next-token loss when the output of each MoE layer is scaled by ``1 - noise``.

    Source: arXiv 2606.18304, attribution-guided layer-local analysis (ALA). The cost is one forward pass over
    ``batches`` for every layer and one more.

    Args:
        model: unchanged afterwards.
        layers: the layers to scale, one at a time.
        batches: model inputs with ``input_ids`` and, if padded, ``attention_mask``.
        noise: in (0, 1]; 1 removes the layer's output.

    Returns:
        ``rise_L`` float64, in nats per token; negative if the loss falls.

    Raises:
        CoverageError: the loss is not finite.
    """

    def mean_loss() -> Tensor:
        sums = {"loss": torch.zeros((), dtype=torch.float64), "tokens": torch.zeros((), dtype=torch.float64)}
        for batch in batches:
            batch_loss, batch_tokens = next_token_loss(model, batch)
            sums["loss"] += batch_loss.cpu()
            sums["tokens"] += batch_tokens
        sums = sum_over_ranks(sums)
        # after the exchange, so that all ranks raise together and none waits for another
        check_loss(sums["loss"])
        return sums["loss"] / sums["tokens"].clamp(min=1)

    with ExitStack() as stack:
        for context in (fast_compute_dtype(model), disable_cache(model), eval_context(model)):
            stack.enter_context(context)
        for layer in layers:
            stack.enter_context(grouped_experts(layer, observe=None, real_tokens=lambda _tokens: None))
        losses = []
        for layer in with_progress([None, *layers], TITLE, total=len(layers) + 1, unit="layer"):
            with nullcontext() if layer is None else _scaled_output(layer.moe, 1.0 - noise):
                losses.append(mean_loss())
    return torch.stack(losses[1:]) - losses[0]


@contextmanager
def _scaled_output(module: Module, scale: float) -> Iterator[None]:
    def hook(_module: Module, _args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]):
        return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
