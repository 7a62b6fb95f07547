from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

from moe_coverage_plugin.core.alignment import align_widths
from moe_coverage_plugin.core.planning import CoverageStrategy, plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.report.view import PlanView

settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def random_view(layers: int = 3, experts: int = 8, channels: int = 64, block_size: int = 8, **changes) -> PlanView:
    """A plan of half the channels from lognormal scores, whose expert 1 of layer 0 no token reached."""
    generator = torch.Generator().manual_seed(layers * experts)
    spread_LE1 = 0.4 + 1.2 * torch.rand(layers, experts, 1, generator=generator, dtype=torch.float64)
    normal_LEI = torch.randn(layers, experts, channels, generator=generator, dtype=torch.float64)
    channels_LEI = (spread_LE1 * normal_LEI).exp()
    channels_LEI[0, 1] = 0
    importance_LE = channels_LEI.sum(-1) / channels_LEI.sum()
    tokens_LE = torch.randint(1, 5000, (layers, experts), generator=generator)
    tokens_LE[0, 1] = 0
    scores = AttributionScores(
        names=[f"model.layers.{layer}.mlp.experts" for layer in range(layers)],
        top_k=[2] * layers,
        channel_metric="activation",
        channels_LEI=channels_LEI,
        first_order_LE=importance_LE,
        second_order_LE=importance_LE,
        tokens_LE=tokens_LE,
        gate_sum_LE=importance_LE,
        layer_loss_L=0.1 + 0.3 * torch.rand(layers, generator=generator, dtype=torch.float64),
    )
    plan = plan_widths(scores, 0.5, CoverageStrategy())
    aligned = align_widths(plan.widths_LE, channels_LEI, block_size, block_size, "l-r-c")
    view = PlanView(
        names=scores.names,
        intermediate_size=channels,
        widths_LE=aligned.widths_LE,
        channels_LEI=channels_LEI,
        expert_prior_LE=plan.expert_prior_LE,
        layer_loss_L=scores.layer_loss_L,
        layer_prior_L=plan.layer_prior_L,
        tokens_LE=tokens_LE,
        title="a random plan",
        facts={"model": "none", "recipe": "by hand"},
    )
    return replace(view, **changes)


@pytest.fixture(scope="session")
def make_view() -> Callable[..., PlanView]:
    return random_view
