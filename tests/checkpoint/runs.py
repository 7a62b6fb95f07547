"""Runs of the toolkit that prune tiny models, and what tests compare of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier
from tests import paper_method
from tests.tiny import CONFIGS, CORRECTION_BIAS, VOCAB, add_tokenizer, four_bits, save_model, token_batches

WIDTH = {"moe_intermediate_size": 128, "intermediate_size": 128}
BLOCK = 32
# for families whose group-limited routers need two kept experts in each group
SPARSITY = {"deepseek_v3": 0.2}
W4 = four_bits(BLOCK)

FP8: dict[str, Any] = {"targets": ["Linear"], "scheme": "FP8_DYNAMIC", "ignore": W4["ignore"]}


def source(directory: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A model of two layers with routers that prefer some experts, so that others are removed."""
    keys = CONFIGS[family]().to_dict().keys()
    shape = {key: value for key, value in WIDTH.items() if key in keys}
    save_model(directory, family, dtype, **{"num_hidden_layers": 2} | shape | config)
    return add_tokenizer(directory)


def linear_model(family: str, **config: Any) -> PreTrainedModel:
    """A random model with linear experts that was never on disk."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{"num_hidden_layers": 2} | config), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(CORRECTION_BIAS):
                tensor.normal_(0.0, 0.03)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif tensor.ndim > 1 and not tensor.any():
                tensor.normal_(0.0, 0.1)  # a router that its family starts at zero
            elif tensor.ndim > 1:
                tensor.mul_(4)
    return linearize_moe(model).eval()


def prune(
    model: Path | PreTrainedModel,
    output: Path | None = None,
    layout: Any = "ragged",
    quantize: bool | dict[str, Any] = False,
    sparsity: float = 0.4,
    min_width: int = 64,
    **options: Any,
) -> PreTrainedModel:
    """Run ``oneshot`` with our four modifiers in blocks of 32, without pictures, which take most of the time.

    Args:
        quantize: ``True`` quantizes to W4A16 in groups of 32; a dictionary has the options of another quantizer.
    """
    recipe: list[Any] = [
        AttributionModifier(channel_metric="activation"),
        CoverageModifier(sparsity=sparsity, **paper_method.EVEN_LAYERS),
        AlignmentModifier(block_size=BLOCK, min_width=min_width, **paper_method.ALIGNMENT),
        ChannelPruningModifier(layout=layout, pictures=False, **paper_method.PRUNING),
    ]
    if quantize:
        recipe.append(QuantizationModifier(**(W4 if quantize is True else quantize)))
    return oneshot(
        model=str(model) if isinstance(model, Path) else model,
        dataset=token_batches(samples=4, length=16),
        recipe=recipe,
        output_dir=str(output) if output is not None else None,
        shuffle_calibration_samples=False,
        **options,
    )


def prompt() -> Tensor:
    return torch.randint(2, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model.eval()(prompt()).logits


def config_json(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors in the files of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - an open file is not a mapping
                assert name not in found, f"{name} is stored twice"
                found[name] = shard.get_tensor(name)
    return found


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights copied out of the mapped file, whose memory alignment affects the last bit."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
