"""Tiny real models and data for tests that run the whole toolkit."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

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
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
        | {"first_k_dense_replace": 1, "intermediate_size": 320, "num_key_value_heads": 4}
        | kw
    ),
    "deepseek_v3": lambda **kw: transformers.DeepseekV3Config(
        **COMMON
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
        | {"first_k_dense_replace": 1, "intermediate_size": 320, "num_key_value_heads": 4}
        | {"n_group": 2, "topk_group": 1}
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
        | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "intermediate_size": 320}
        | kw
    ),
    "gpt_oss": lambda **kw: transformers.GptOssConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "head_dim": 32} | kw
    ),
}


def save_model(directory: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **config) -> Path:
    """Write a random model whose experts differ in size, so that budgets become ragged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**config), dtype=torch.float32)
    _diversify(model)
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
def _diversify(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "experts." in name and parameter.ndim == 3:
            # lognormal factors: some experts and channels matter far more than others
            factors = torch.randn(parameter.shape[0], 1, 1).mul(0.7).exp()
            parameter.mul_(6 * factors)
        elif parameter.ndim == 2 and "norm" not in name:
            parameter.mul_(3)


def token_batches(samples: int = 12, length: int = 48, padded: bool = False, seed: int = 1) -> Dataset:
    """Random token ids with attention masks; padded on the right to various lengths where asked."""
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
