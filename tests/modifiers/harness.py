"""Runs of the real toolkit on tiny models, and what the tests compare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload.module import offload_module, remove_module_offload
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers import Modifier
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageError,
    CoverageModifier,
)
from moe_coverage_plugin.modeling.causal_mask import mark_causal_attention, unmark_causal_attention
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests import paper_method
from tests.tiny import VOCAB, four_bits, save_model, token_batches

LAYERS, EXPERTS, CHANNELS, TOP_K = 2, 8, 256, 2
BLOCK = 64
# 4 bits in groups that BLOCK is a multiple of
W4_GROUP_64 = four_bits(64)

# pruning() as a file
YAML = """
prune_stage:
  prune_modifiers:
    AttributionModifier: {channel_metric: activation}
    CoverageModifier: {sparsity: 0.25, scope: layers, inter_layer: uniform, intra_layer: coverage}
    AlignmentModifier: {block_size: 64, strategy: hamilton, min_width: 64}
    ChannelPruningModifier: {reconstruct: false}
"""


def save_tiny(directory: Path, family: str = "qwen3_moe", **config: Any) -> Path:
    """A model so small that a ``oneshot`` takes half a second."""
    return save_model(directory, family, **{"num_hidden_layers": LAYERS, "moe_intermediate_size": CHANNELS} | config)


def open_linear(source: Path) -> PreTrainedModel:
    """The model with its experts as linear modules, as ``oneshot`` prepares it."""
    model = AutoModelForCausalLM.from_pretrained(source)
    linearize_moe(model)
    return model.eval()


def pruning(
    sparsity: float = 0.25,
    block_size: int | None = BLOCK,
    layout: Any = "ragged",
    ignore: Sequence[str] = (),
    pictures: bool = False,
    layer_noise: float | None = None,
    **coverage: Any,
) -> list[Modifier]:
    """The paper's method with an even budget for layers; without alignment if ``block_size`` is ``None``.

    Without pictures, which would take nine tenths of so small a run. If the budget of layers is even, also without
    their importance, which would take a fifth of it.
    """
    attribution = paper_method.ATTRIBUTION | ({} if "inter_layer" in coverage else {"layer_noise": layer_noise})
    alignment = AlignmentModifier(block_size=block_size or 1, min_width=block_size or 0, **paper_method.ALIGNMENT)
    return [
        AttributionModifier(ignore=list(ignore), **attribution),
        CoverageModifier(sparsity=sparsity, **paper_method.EVEN_LAYERS | coverage),
        *([] if block_size is None else [alignment]),
        ChannelPruningModifier(layout=layout, pictures=pictures, **paper_method.PRUNING),
    ]


def compress(model: PreTrainedModel | Path, recipe: Any, **options: Any) -> PreTrainedModel:
    """A real ``oneshot`` on four short samples, always in the same order because float sums depend on it."""
    defaults = {"dataset": token_batches(samples=4, length=24), "shuffle_calibration_samples": False}
    return oneshot(model=str(model) if isinstance(model, Path) else model, recipe=recipe, **defaults | options)


def compress_causally(model: PreTrainedModel, recipe: Any, **options: Any) -> PreTrainedModel:
    """A run of the toolkit's modifiers alone, with the causal mask that our modifiers keep in a shared recipe."""
    mark_causal_attention(model)
    try:
        return compress(model, recipe, **options)
    finally:
        unmark_causal_attention(model)


def offload_to_disk(model: PreTrainedModel, directory: Path) -> None:
    """Keep all weights of a model on disk; it computes on the CPU."""
    for module in model.modules():
        remove_module_offload(module)
        offload_module(module, "cpu", "disk", offload_dir=str(directory))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Logits of two fixed sequences."""
    ids = torch.randint(2, VOCAB, (2, 16), generator=torch.Generator().manual_seed(5))
    return model.eval()(ids.to(model.device)).logits.cpu()


def widths(model: PreTrainedModel) -> list[list[int]]:
    """Channels of every expert of every layer, from the modules."""
    return [layer.widths for layer in find_moe_layers(model)]


def flat_widths(model: PreTrainedModel) -> list[int]:
    """The same in one list."""
    return [width for layer in widths(model) for width in layer]


def refusal(model: PreTrainedModel | Path, recipe: Any, output: Path, **options: Any) -> str:
    """The error message of a run that stops before anything has happened.

    Checks that no forward pass ran, all weights are bit-identical, and the output directory is unchanged.
    """
    model = open_linear(model) if isinstance(model, Path) else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    output_before = output.is_dir() and sorted(output.iterdir())
    calls: list[None] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(None))
    try:
        with pytest.raises(CoverageError) as caught:
            compress(model, recipe, output_dir=str(output), **options)
    finally:
        handle.remove()
    assert not calls, "calibration had begun"
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert (output.is_dir() and sorted(output.iterdir())) == output_before
    message = str(caught.value)
    assert "\n" not in message
    assert not re.search(r"\w\. ", message), "one sentence"
    return message
