"""What the memory check of ``obs`` says, compared with what scoring takes."""

from __future__ import annotations

import pytest
import torch

from moe_coverage_plugin.calibration.interactions import matrix_bytes
from moe_coverage_plugin.core.obs import obs_scores, pooled_curvature
from moe_coverage_plugin.core.reconstruction import gram
from tests.peak import Peak


@pytest.mark.parametrize(("channels", "least"), [(64, 0.8), (96, 0.6), (384, 0.6)])
def test_the_check_counts_what_scoring_takes(channels: int, least: float):
    """As for a chunk of experts: both halves of Gram matrices in float32, and curvature of a wider hidden state."""
    experts, hidden = 8, 3 * channels
    output_HH = torch.eye(hidden)
    with Peak() as peak:
        grams_2DII = torch.zeros(2, experts, channels, channels)
        for half_DII in grams_2DII:
            for gram_II in half_DII:
                gram_II += gram(torch.randn(2 * channels, channels), torch.ones(2 * channels))
        gram_DII = grams_2DII.sum(0)
        del grams_2DII, half_DII, gram_II
        down_DHI = torch.randn(experts, hidden, channels)
        curvature_DII = pooled_curvature(down_DHI, output_HH, torch.ones(experts, channels))
        del down_DHI
        obs_scores(gram_DII, curvature_DII)
    counted = experts * matrix_bytes(channels)
    assert least * counted < peak.bytes < counted
