"""Writes a checkpoint of random weights, which are drawn on the card, one layer at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.whole_job.shapes import Shape
from moe_coverage_plugin.manifest import CoverageError

WORDS = 512
# standard deviation at a hidden size of 128, which keeps the size of hidden states at larger ones
SPREAD, WIDTH = 0.06, 128
# experts and channels differ by log-normal factors, so that a plan gives experts unequal widths
EXPERT_SPREAD, CHANNEL_SPREAD = 0.7, 0.5


def write_checkpoint(directory: Path, shape: Shape, seed: int, device: torch.device, reserve: int) -> None:
    """Write a model in bfloat16, one file per layer, with a tokenizer of one token per word.

    Args:
        directory: directory to create in one that exists; an earlier one is replaced.
        shape: the model.
        seed: seed of the weights.
        device: the device that draws them; another device draws other weights.
        reserve: bytes of disk that later phases need.

    Raises:
        CoverageError: the disk is too small.
    """
    fields = dict(shape.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        layers[int(found[1]) + 1 if found else 0][name] = tensor
    total = sum(tensor.nbytes for shapes in layers.values() for tensor in shapes.values())
    replaced = sum(file.stat().st_size for file in directory.glob("*"))
    if (free := shutil.disk_usage(directory.parent).free + replaced) < total + reserve:
        raise CoverageError(
            f"{directory.parent} has {free / 1e9:.0f} GB of free disk and the checkpoint with the results beside it "
            f"takes {(total + reserve) / 1e9:.0f} GB: choose fewer --layers, or another --directory"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    generator = torch.Generator(device).manual_seed(seed)
    weight_map = {}
    for index, shapes in sorted(layers.items()):
        file = f"model-{index + 1:05}-of-{len(layers):05}.safetensors"
        factors: dict[str, float] = {}
        shard = {name: _drawn(name, tensor, factors, generator).cpu() for name, tensor in shapes.items()}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    contents = {"metadata": {"total_size": total}, "weight_map": weight_map}
    # last, so that a checkpoint with an index is complete
    (directory / "model.safetensors.index.json").write_text(json.dumps(contents))
    # the toolkit requires a tokenizer even if the data set consists of token ids
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1").save_pretrained(directory)


def is_complete(directory: Path) -> bool:
    """Whether :func:`write_checkpoint` has written everything."""
    return (directory / "model.safetensors.index.json").is_file() and (directory / "tokenizer.json").is_file()


def _drawn(name: str, shape: Tensor, factors: dict[str, float], generator: torch.Generator) -> Tensor:
    """Random weights of one tensor; ``factors`` are those of the experts of the layer drawn so far."""
    device = generator.device
    tensor = torch.empty(shape.shape, dtype=shape.dtype, device=device)
    if tensor.ndim == 1:
        return tensor.fill_(0 if name.endswith("bias") else 1)
    deviation = SPREAD * (WIDTH / shape.shape[-1]) ** 0.5
    if expert := re.search(r"\.experts\.(\d+)\.", name):
        if expert[1] not in factors:
            factors[expert[1]] = float(torch.randn((), device=device, generator=generator).mul(EXPERT_SPREAD).exp())
        deviation *= factors[expert[1]]
    tensor.normal_(0, deviation, generator=generator)
    if expert and name.endswith("down_proj.weight"):
        channels_I = torch.randn(tensor.shape[1], device=device, generator=generator)
        tensor *= channels_I.mul(CHANNEL_SPREAD).exp().to(tensor.dtype)
    return tensor
