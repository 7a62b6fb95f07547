"""Draws continuations by transformers, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading, dispatch_model
from compressed_tensors.offload.dispatch import remove_dispatch
from torch.nn import Module
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import computes_as_toolkit, grouped_experts
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.sampling.engines import up_to_stop


class TransformersEngine:
    """Draws by ``model.generate``, with neither the filters nor the penalties of the model's generation config.

    Args:
        model: with linear experts, on its devices; its experts compute together while this object draws.
        temperature: divisor of the logits.
        batch_size: prompts at a time.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, batch_size: int):
        """Keep the model."""
        self._model, self._temperature, self._batch_size = model.eval(), temperature, batch_size

    def __call__(self, prompts: Sequence[list[int]], stops: frozenset[int], length: int, seed: int) -> list[list[int]]:
        """Draw (see :class:`Engine`); one seed gives the same text again on the same device."""
        # prompts of similar length share a batch, because shorter ones are padded
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        drawn: list[list[int]] = [[] for _ in prompts]
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        total = sum(length - len(prompt) for prompt in prompts)
        bar = tqdm(total=total, desc="Writing text", unit="tok", disable=None)
        with torch.random.fork_rng(devices), bar, fast_experts(self._model):
            torch.manual_seed(seed)
            for first in range(0, len(order), self._batch_size):
                batch = order[first : first + self._batch_size]
                for index, ids in zip(batch, self._draw([prompts[i] for i in batch], stops, length, bar), strict=True):
                    drawn[index] = ids
        return drawn

    @torch.no_grad()
    def _draw(self, prompts: list[list[int]], stops: frozenset[int], length: int, bar: Any) -> list[list[int]]:
        longest = max(map(len, prompts))
        pad = min(stops, default=0)
        ids_BS = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model: Any = self._model
        began = bar.n
        # one of its own: generate fills what a config leaves open from that of the model, such as top_k
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            out_BS = model.generate(
                ids_BS.to(model.device),
                attention_mask=mask_BS.to(model.device),
                generation_config=GenerationConfig(
                    do_sample=True,
                    temperature=self._temperature,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=length - min(map(len, prompts)),
                    eos_token_id=sorted(stops) or None,
                    pad_token_id=pad,
                ),
                stopping_criteria=StoppingCriteriaList([_Progress(bar, len(prompts))]),
            )
        finally:
            model.generation_config = own
        # documents that end early count as written
        bar.update(began + sum(length - len(prompt) for prompt in prompts) - bar.n)
        rows = zip(out_BS[:, longest:].tolist(), prompts, strict=True)
        return [up_to_stop(row[: length - len(prompt)], stops) for row, prompt in rows]


class _Progress(StoppingCriteria):
    """Moves a progress bar by one token for each document."""

    def __init__(self, bar: Any, documents: int):
        self._bar, self._documents = bar, documents

    def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
        self._bar.update(self._documents)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def fast_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let the experts of each layer compute together, and the model in a dtype that the processor is fast in."""
    with ExitStack() as stack:
        stack.enter_context(fast_compute_dtype(model, for_many_calls=True))
        for layer in find_moe_layers(model):
            # experts of a pruned model can have several widths
            if computes_as_toolkit(layer) and len(set(layer.widths)) == 1:
                stack.enter_context(grouped_experts(layer, None, lambda _: None))
        yield


@contextmanager
def on_accelerator(model: PreTrainedModel) -> Iterator[None]:
    """Move a model from CPU memory to the GPUs, if there are any, and back; what does not fit stays offloaded.

    ``oneshot`` copies the weights of a layer to the GPU for each call, which is too slow for one token at a time.
    """
    with disable_onloading():
        resident = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not resident or not torch.cuda.is_available():
        yield
        return
    dispatch_model(model)
    try:
        yield
    finally:
        remove_dispatch(model)
        Module.to(model, "cpu")
