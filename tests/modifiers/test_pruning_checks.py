"""Plans that leave routers too few experts, on layers of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from llmcompressor.modeling.moe.linearize import linearize_moe
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, routing_groups
from moe_coverage_plugin.modifiers.pruning_checks import check_routable
from tests.modifiers.harness import EXPERTS, open_linear
from tests.tiny import CONFIGS


def test_experts_chosen_by_a_table_cannot_be_removed(source):
    """A hash router looks experts up by token id, so tokens would still be sent to removed experts."""
    layer = find_moe_layers(open_linear(source))[0]
    config = DeepseekV4Config(num_experts_per_tok=layer.top_k, n_routed_experts=EXPERTS, hidden_size=128, vocab_size=8)
    hashed = replace(layer, router=DeepseekV4HashRouter(config))
    widths_E = torch.full((EXPERTS,), 64)
    check_routable(hashed, widths_E)
    widths_E[2] = 0
    check_routable(layer, widths_E)
    with pytest.raises(CoverageError, match=r"would lose 1 of 8 experts.* table of token ids.*layout='padded'"):
        check_routable(hashed, widths_E)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_groups_of_a_router_keep_two_experts_each(family):
    """Such a router scores a group by its two best experts, so in a smaller group it would choose removed experts."""
    layer = find_moe_layers(linearize_moe(AutoModelForCausalLM.from_config(CONFIGS[family](n_group=2))))[0]
    assert routing_groups(layer) == (2, 1)
    widths_E = torch.tensor([64, 64, 0, 0, 0, 64, 0, 64])
    check_routable(layer, widths_E)
    widths_E[5] = 0
    with pytest.raises(CoverageError, match="would keep 1 experts in a group of its router, which needs 2"):
        check_routable(layer, widths_E)
