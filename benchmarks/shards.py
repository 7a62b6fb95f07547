"""Writes a sharded checkpoint of random weights, layer by layer, so that only one layer is in memory."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

WORDS = 512
SPREAD = 0.02


def write_shards(directory: Path, config: PretrainedConfig, seed: int) -> None:
    """Write a model in bfloat16 with one file per layer, an index, and a tokenizer with one token per word.

    Args:
        directory: directory to create.
        config: configuration of the model.
        seed: seed of the weights, which are normally distributed; weights of norms are 1.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        layers[int(found[1]) + 1 if found else 0][name] = tensor
    generator = torch.Generator().manual_seed(seed)
    weight_map = {}
    for index, shapes in sorted(layers.items()):
        file = f"model-{index + 1:05}-of-{len(layers):05}.safetensors"
        shard = {name: _random(tensor, generator) for name, tensor in shapes.items()}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shapes in layers.values() for tensor in shapes.values())
    contents = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(contents))
    # the toolkit requires a tokenizer even if the data set consists of token ids
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1").save_pretrained(directory)


def _random(shape: Tensor, generator: torch.Generator) -> Tensor:
    tensor = torch.empty(shape.shape, dtype=torch.bfloat16)
    return tensor.fill_(1) if tensor.ndim == 1 else tensor.normal_(0, SPREAD, generator=generator)


def stored_bytes(directory: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
