"""Scores of models with offloaded weights, which are copied to the device for each call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmcompressor import oneshot

from moe_coverage_plugin import AttributionModifier
from moe_coverage_plugin.modeling.grouped_experts import LinearProjection
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.calibration.brute_force import FIELDS, open_stock, save_float64
from tests.modifiers.harness import offload_to_disk
from tests.tiny import token_batches

pytestmark = pytest.mark.slow


def on_disk(source: Path, directory: Path):
    """Open the model with all weights offloaded to disk."""
    model = open_stock(source, linear=True)
    directory.mkdir()
    offload_to_disk(model, directory)
    return model


@pytest.mark.parametrize("metric", ["activation", "weight_activation", "fisher", "snip", "obs"])
def test_offloaded_weights_give_the_same_scores(tmp_path: Path, metric: str):
    source = save_float64(tmp_path / "model", "qwen2_moe")
    measured = []
    for model in (open_stock(source, linear=True), on_disk(source, tmp_path / "offloaded")):
        modifier = AttributionModifier(channel_metric=metric, layer_noise=1.0)
        data = token_batches(samples=3, length=20, padded=True)
        oneshot(model=model, dataset=data, recipe=[modifier], shuffle_calibration_samples=False)
        measured.append(modifier.measured)
    resident, offloaded = measured
    for name in (*FIELDS, "layer_loss_L"):
        assert torch.equal(getattr(offloaded, name), getattr(resident, name)), name


def test_offloaded_weights_are_not_held_between_calls(tmp_path: Path):
    """Case 19: references to the copies on the device would keep the entire model there."""
    source = save_float64(tmp_path / "model", "qwen2_moe")
    models = (open_stock(source, linear=True), on_disk(source, tmp_path / "disk"))
    up_projs = [[mlp.up_proj for mlp in find_moe_layers(model)[0].mlps] for model in models]
    resident, offloaded = (LinearProjection("up_proj", linears)._held for linears in up_projs)
    assert resident is not None
    assert offloaded is None
