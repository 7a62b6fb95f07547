"""Plans that a router could not live with, on blocks of real models."""

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
    """A hash router looks experts up by token id: tokens would still go to removed ones, and be answered by zero."""
    block = find_moe_layers(open_linear(source))[0]
    config = DeepseekV4Config(num_experts_per_tok=block.top_k, n_routed_experts=EXPERTS, hidden_size=128, vocab_size=8)
    hashed = replace(block, router=DeepseekV4HashRouter(config))
    widths_E = torch.full((EXPERTS,), 64)
    check_routable(hashed, widths_E)
    widths_E[2] = 0
    check_routable(block, widths_E)
    with pytest.raises(CoverageError, match=r"would lose 1 of 8 experts.* table of token ids.*layout='padded'"):
        check_routable(hashed, widths_E)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_groups_of_a_router_keep_two_experts_each(family):
    """Such a router scores a group by its best two experts; of a group with less it would choose removed ones."""
    block = find_moe_layers(linearize_moe(AutoModelForCausalLM.from_config(CONFIGS[family](n_group=2))))[0]
    assert routing_groups(block) == (2, 1)
    widths_E = torch.tensor([64, 64, 0, 0, 0, 64, 0, 64])
    check_routable(block, widths_E)
    widths_E[5] = 0
    with pytest.raises(CoverageError, match="would keep 1 experts in a group of its router, which needs 2"):
        check_routable(block, widths_E)
