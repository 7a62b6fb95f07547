from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

from moe_coverage_plugin.report.stored_weights import StoredWeights
from moe_coverage_plugin.report.summary import Summary
from moe_coverage_plugin.report.view import PlanView

settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def random_view(layers: int = 3, experts: int = 8, channels: int = 64, block_size: int = 8, **changes) -> PlanView:
    """A plan with lognormal scores; expert 1 of layer 0 has no tokens and is removed."""
    generator = torch.Generator().manual_seed(layers * experts)
    spread_LE1 = 0.4 + 1.2 * torch.rand(layers, experts, 1, generator=generator, dtype=torch.float64)
    normal_LEI = torch.randn(layers, experts, channels, generator=generator, dtype=torch.float64)
    channels_LEI = (spread_LE1 * normal_LEI).exp()
    tokens_LE = torch.randint(32, 5000, (layers, experts), generator=generator)
    widths_LE = block_size * torch.randint(1, channels // block_size + 1, (layers, experts), generator=generator)
    layer_loss_L = 0.1 + 0.3 * torch.rand(layers, generator=generator, dtype=torch.float64)
    for values in (channels_LEI, tokens_LE, widths_LE):
        values[0, 1] = 0
    view = PlanView(
        names=[f"model.layers.{layer}.mlp.experts" for layer in range(layers)],
        intermediate_size=channels,
        widths_LE=widths_LE,
        channels_LEI=channels_LEI,
        expert_prior_LE=channels_LEI.sum(-1).sqrt(),
        layer_loss_L=layer_loss_L,
        layer_prior_L=layer_loss_L.sqrt(),
        tokens_LE=tokens_LE,
        title="a random plan",
        summary=Summary("mini-moe", "by_hand", 8, 4096, StoredWeights(3 * 2**20, 12 * 2**20, "4 bits", "int")),
        facts={"channel scores": "fisher", "seed": "17"},
    )
    return replace(view, **changes)


@pytest.fixture(scope="session")
def make_view() -> Callable[..., PlanView]:
    return random_view


UNMEASURED = ("channels_LEI", "expert_prior_LE", "layer_loss_L", "layer_prior_L", "tokens_LE")


@pytest.fixture(scope="session")
def bare_view() -> PlanView:
    """A plan that has only widths."""
    return random_view(**dict.fromkeys(UNMEASURED), facts={}, title="", summary=Summary())
