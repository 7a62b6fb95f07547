"""What routers need, on layers of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmcompressor.modeling.moe.linearize import linearize_moe
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from moe_coverage_plugin.core.kept_experts import RouterNeeds
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, router_needs, routing_groups
from moe_coverage_plugin.modeling.router_mask import check_maskable
from tests.modifiers.harness import EXPERTS, TOP_K, open_linear
from tests.tiny import CONFIGS


def test_experts_chosen_by_a_table_are_all_needed(source):
    """A hash router looks experts up by token id, so tokens would still be sent to removed experts."""
    layer = find_moe_layers(open_linear(source))[0]
    assert router_needs(layer) == RouterNeeds(1, TOP_K)
    config = DeepseekV4Config(num_experts_per_tok=layer.top_k, n_routed_experts=EXPERTS, hidden_size=128, vocab_size=8)
    hashed = replace(layer, router=DeepseekV4HashRouter(config))
    assert router_needs(hashed) == RouterNeeds(1, EXPERTS)
    check_maskable(hashed)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_groups_of_a_router_need_two_experts_each(family):
    """Such a router scores a group by its two best experts, so in a smaller group it would choose removed experts."""
    layer = find_moe_layers(linearize_moe(AutoModelForCausalLM.from_config(CONFIGS[family](n_group=2))))[0]
    assert routing_groups(layer) == (2, 1)
    assert router_needs(layer) == RouterNeeds(2, 2)
