"""Writes checkpoints without weights, for an engine that fills the parameters with random numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_coverage_plugin.manifest import CONFIG_KEY, Manifest

# config.json of Qwen3-30B-A3B
FULL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = FULL | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "intermediate_size": 128,
    "vocab_size": 512,
}

BLOCKS = 6
"""Blocks of channels in an unpruned expert. Each is one quantization group, 128 channels in the full shape."""

KEPT_BLOCKS = 4.5
"""Mean blocks of a pruned expert: a quarter of the channels is removed."""


@dataclass(frozen=True)
class Variant:
    """One way to store the model: ``bits`` of attention and expert weights, and whether experts are pruned."""

    bits: int
    pruned: bool


VARIANTS: dict[str, Variant] = {
    "stock4": Variant(4, pruned=False),
    "ours4": Variant(4, pruned=True),
    "stock8": Variant(8, pruned=False),
    "ours8": Variant(8, pruned=True),
    "stock16": Variant(16, pruned=False),
    "ours16": Variant(16, pruned=True),
}


def random_widths(layers: int, experts: int, width: int, seed: int) -> list[list[int]]:
    """Draw the widths of all experts, multiples of a block whose mean is three quarters of ``width``.

    Every expert keeps one block. The other blocks are assigned at random over all experts of the model, so that all
    numbers of blocks occur, as in a plan with a global budget.

    Args:
        layers: number of layers.
        experts: experts per layer.
        width: channels of an unpruned expert, a multiple of ``BLOCKS``.
        seed: seed of the draw.
    """
    free = BLOCKS - 1
    kept = round(layers * experts * (KEPT_BLOCKS - 1))
    chosen = torch.randperm(layers * experts * free, generator=torch.Generator().manual_seed(seed))[:kept]
    blocks_LE = 1 + torch.bincount(chosen // free, minlength=layers * experts).view(layers, experts)
    return (blocks_LE * (width // BLOCKS)).tolist()


def write_checkpoint(directory: Path, shape: dict[str, Any], variant: Variant, seed: int) -> None:
    """Write ``config.json`` of one variant, without weights and tokenizer.

    Args:
        directory: directory to create.
        shape: the unpruned model, ``FULL`` or ``SMALL``, possibly with fewer layers.
        variant: how the model is stored.
        seed: seed of the widths of pruned experts.
    """
    config = dict(shape)
    width = shape["moe_intermediate_size"]
    quantization = _quantization(variant.bits, group_size=width // BLOCKS)
    if variant.pruned:
        widths_LE = random_widths(shape["num_hidden_layers"], shape["num_experts"], width, seed)
        widths = {f"model.layers.{layer}.mlp.experts": widths_E for layer, widths_E in enumerate(widths_LE)}
        manifest = Manifest("ragged", width, widths, block_size=width // BLOCKS, provenance={"random": seed})
        quantization[CONFIG_KEY] = manifest.to_entry()
        config["moe_intermediate_size"] = manifest.declared_width
    if variant.bits != 16 or variant.pruned:
        config["quantization_config"] = quantization
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


def _quantization(bits: int, group_size: int) -> dict[str, Any]:
    """Return the toolkit's entry for W4A16 or FP8_DYNAMIC of all linear layers except routers and head.

    For 16 bits, the entry has no quantized layers.
    """
    if bits == 16:
        return {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    stored: dict[str, Any] = {"num_bits": bits, "symmetric": True, "dynamic": False}
    activations = None
    if bits == 4:
        stored |= {"type": "int", "strategy": "group", "group_size": group_size, "actorder": None}
    else:
        activations = stored | {"type": "float", "strategy": "token", "dynamic": True}
        stored |= {"type": "float", "strategy": "channel"}
    written = "pack-quantized" if bits == 4 else "float-quantized"
    group = {"targets": ["Linear"], "weights": stored, "input_activations": activations, "format": written}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
