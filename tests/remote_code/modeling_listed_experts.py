"""Code beside a checkpoint, structured as that of DeepSeek-MoE-16B: experts in a list, a router with its own weight.

Attention, norms and rotary positions are Llama's.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class DeepseekConfig(LlamaConfig):
    model_type = "deepseek"

    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001


class DeepseekMLP(nn.Module):
    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    """Softmax over all experts, then the best; answers a third value that counts in training only."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.alpha = config.aux_loss_alpha
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.flatten(0, -2), self.weight)
        scores = logits.softmax(dim=-1)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        loss = None
        if self.training:
            share = F.one_hot(ids, scores.shape[-1]).float().mean((0, 1))
            loss = self.alpha * scores.shape[-1] * (share * scores.mean(0)).sum()
        return ids, weights, loss


class DeepseekMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.experts = nn.ModuleList(
            DeepseekMLP(config, config.moe_intermediate_size) for _ in range(config.n_routed_experts)
        )
        self.gate = MoEGate(config)
        self.shared_experts = DeepseekMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states):
        ids, weights, _ = self.gate(hidden_states)
        routed = self.moe_infer(hidden_states.flatten(0, -2), ids.flatten(), weights.flatten())
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)

    @torch.no_grad()
    def moe_infer(self, x, expert_of_slot, weight_of_slot):
        """Every expert over its tokens, which are sorted by expert."""
        answer = torch.zeros_like(x)
        slots = expert_of_slot.argsort()
        counts = expert_of_slot.bincount(minlength=len(self.experts)).tolist()
        for expert, mine in zip(self.experts, slots.split(counts), strict=True):
            if len(mine):
                tokens = mine // self.num_experts_per_tok
                answer.index_add_(0, tokens, expert(x[tokens]) * weight_of_slot[mine, None])
        return answer


class DeepseekDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace or layer_idx % config.moe_layer_freq
        self.mlp = DeepseekMLP(config, config.intermediate_size) if dense else DeepseekMoE(config)


class DeepseekModel(LlamaModel):
    config_class = DeepseekConfig
    _no_split_modules = ("DeepseekDecoderLayer",)

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, idx) for idx in range(config.num_hidden_layers))
        self.post_init()


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = DeepseekConfig
    _no_split_modules = ("DeepseekDecoderLayer",)

    def __init__(self, config):
        super().__init__(config)
        self.model = DeepseekModel(config)
        self.post_init()


DeepseekConfig.register_for_auto_class()
DeepseekForCausalLM.register_for_auto_class("AutoModelForCausalLM")
