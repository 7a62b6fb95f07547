"""Tiny real models and data for tests that run the whole toolkit."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.remote_code.modeling_listed_experts import DeepseekConfig, DeepseekForCausalLM

VOCAB = 512
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
# vLLM's kernels know the published sizes only; keys and values are compressed, positions scaled by YaRN
MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
# the larger DeepSeek-V2: experts of a token come from some groups only
GROUP_LIMITED = {
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 64,
    "routed_scaling_factor": 16.0,
}
CORRECTION_BIAS = "e_score_correction_bias"
LISTED = "deepseek"
CONFIGS = {
    "qwen3_moe": lambda **kw: transformers.Qwen3MoeConfig(
        **COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64} | kw
    ),
    "qwen2_moe": lambda **kw: transformers.Qwen2MoeConfig(
        **COMMON
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
        | {"shared_expert_intermediate_size": 384, "intermediate_size": 256}
        | kw
    ),
    "mixtral": lambda **kw: transformers.MixtralConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256} | kw
    ),
    "olmoe": lambda **kw: transformers.OlmoeConfig(
        **COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256} | kw
    ),
    "deepseek_v2": lambda **kw: transformers.DeepseekV2Config(
        **COMMON
        | MLA
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "intermediate_size": 320, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
        | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"}
        | kw
    ),
    "deepseek_v3": lambda **kw: transformers.DeepseekV3Config(
        **COMMON
        | MLA
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "intermediate_size": 320, "q_lora_rank": 64, "n_group": 2, "topk_group": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | kw
    ),
    "glm4_moe": lambda **kw: transformers.Glm4MoeConfig(
        **COMMON
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 32, "intermediate_size": 320}
        | kw
    ),
    "granitemoe": lambda **kw: transformers.GraniteMoeConfig(
        **COMMON | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256} | kw
    ),
    "ernie4_5_moe": lambda **kw: transformers.Ernie4_5_MoeConfig(
        **COMMON
        | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "intermediate_size": 320, "tie_word_embeddings": True}
        | kw
    ),
    "minimax_m2": lambda **kw: transformers.MiniMaxM2Config(
        **COMMON
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256, "head_dim": 32}
        | {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
        | kw
    ),
    # vLLM's kernels for CPUs know one size of a head of linear attention
    "qwen3_next": lambda **kw: transformers.Qwen3NextConfig(
        **COMMON
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | {"shared_expert_intermediate_size": 192, "intermediate_size": 256, "head_dim": 32}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 16, "full_attention_interval": 2}
        | kw
    ),
    "qwen3_5_moe": lambda **kw: transformers.Qwen3_5MoeTextConfig(
        **COMMON
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32}
        | {"shared_expert_intermediate_size": 192, "linear_num_key_heads": 2, "linear_num_value_heads": 16}
        | {"layer_types": ["linear_attention", "full_attention"] * (kw.get("num_hidden_layers", 4) // 2)}
        | {"num_hidden_layers": 4}
        | kw
    ),
    "gpt_oss": lambda **kw: transformers.GptOssConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "head_dim": 32} | kw
    ),
}


def listed_model(**config) -> PreTrainedModel:
    """DeepSeek-MoE-16B: transformers does not know it, its code lies beside the checkpoint, its experts are a list."""
    shape = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 320}
    kept = {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return DeepseekForCausalLM(DeepseekConfig(**COMMON | shape | kept | config))


def seeing_config(family: str = "qwen3_vl_moe", **text) -> PretrainedConfig:
    """A model that sees, its language model nested in it; of qwen3_5_moe there is a class for text alone, too."""
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    vision |= {"num_position_embeddings": 64}
    marks = {f"{name}_token_id": VOCAB + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if family == "qwen3_5_moe":
        # a quarter of each head is rotated, in four pairs
        rope |= {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
        nested = CONFIGS[family](**{"rope_parameters": rope} | text).to_dict()
        return transformers.Qwen3_5MoeConfig(text_config=nested, vision_config=vision, **marks)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 128}
    return transformers.Qwen3VLMoeConfig(
        text_config=COMMON | experts | {"head_dim": 32, "rope_parameters": rope} | text,
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        **marks,
    )


def four_bits(group_size: int) -> dict[str, Any]:
    """Fields of a quantizer to 4 bits in groups, which leaves routing in full precision."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*shared_expert_gate$"],
    }


def save_model(directory: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **config) -> Path:
    """Write a random model whose experts differ in size, so that budgets become ragged."""
    torch.manual_seed(0)
    if family == LISTED:
        model = listed_model(**config)
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS[family](**config), dtype=torch.float32)
    diversify(model)
    model.to(dtype).save_pretrained(directory)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """Put a tokenizer of one word per token id beside a model; ``oneshot`` wants one for most families."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1")
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def diversify(model: PreTrainedModel) -> None:
    """Make some experts and channels of a random model matter far more than others, in place."""
    for name, parameter in model.named_parameters():
        if "experts." in name and parameter.ndim == 3:
            factors = torch.randn(parameter.shape[0], 1, 1).mul(0.7).exp()  # lognormal
            parameter.mul_(6 * factors.to(parameter))
        elif re.search(r"\.experts\.\d+\.", name):
            parameter.mul_(6 * torch.randn(()).mul(0.7).exp())
        elif name.endswith(CORRECTION_BIAS):
            continue
        elif parameter.ndim == 2 and not parameter.any():
            parameter.normal_(0.0, 0.06)  # a router that its family starts at zero
        elif parameter.ndim == 2 and "norm" not in name:
            parameter.mul_(3)
    for name, tensor in model.state_dict().items():
        if name.endswith(CORRECTION_BIAS):
            tensor.normal_(0.0, 0.03)  # some are buffers; all start at zero


def token_batches(samples: int = 12, length: int = 48, padded: bool = False, seed: int = 1) -> Dataset:
    """Random token ids with attention masks; padded on the right to various lengths where asked."""
    # a data set hashes its contents when it is made, and its format can be set
    return copy.copy(_token_batches(samples, length, padded, seed))


@cache
def _token_batches(samples: int, length: int, padded: bool, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(samples):
            mask[row, length - 4 * (row % 6) :] = 0
        ids = ids.masked_fill(mask == 0, 1)
    return Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})


def config_of(directory: Path) -> PretrainedConfig:
    """The transformers config of a checkpoint."""
    return transformers.AutoConfig.from_pretrained(directory)
