"""Shapes of models, as fields of their configs in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32, "beta_slow": 1}
# with W4A16, groups of 128 divide no layer of 10944 channels
DENSE_DOWN = r"re:.*layers\.0\.mlp\.down_proj$"


@dataclass(frozen=True)
class Shape:
    """A model without weights.

    Attributes:
        title: name of the model.
        config: fields of its config.
        ignore: layers that W4A16 cannot quantize, beside the head.
    """

    title: str
    config: dict[str, Any]
    ignore: list[str] = field(default_factory=list)

    def with_layers(self, layers: int | None) -> Shape:
        """The same with fewer layers; ``None``: all."""
        return self if layers is None else Shape(self.title, {**self.config, "num_hidden_layers": layers}, self.ignore)


SHAPES = {
    "qwen3-30b-a3b": Shape("Qwen3-30B-A3B", QWEN3),
    "deepseek-v2-lite": Shape(
        "DeepSeek-V2-Lite",
        DEEPSEEK
        | {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "vocab_size": 102400}
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        [DENSE_DOWN],
    ),
    "qwen3-235b-a22b": Shape(
        "Qwen3-235B-A22B",
        QWEN3
        | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"moe_intermediate_size": 1536, "intermediate_size": 12288},
    ),
    "deepseek-v3": Shape(
        "DeepSeek-V3",
        DEEPSEEK
        | {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "vocab_size": 129280}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    # for a profile on a CPU
    "medium": Shape(
        "a medium shape",
        QWEN3
        | {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 1024},
    ),
    # for a trial
    "tiny": Shape(
        "a tiny shape",
        QWEN3
        | {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | {"intermediate_size": 256, "vocab_size": 512},
    ),
}


def experts_of(config: Config) -> int:
    """Experts of a layer, without shared ones."""
    return config.get("num_experts") or config["n_routed_experts"]


def moe_layers_of(config: Config) -> int:
    """Layers that have experts."""
    return config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
