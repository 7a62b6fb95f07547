"""Runs whose plan or router would have failed after calibration: they work, or stop before the first forward pass."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, ChannelPruningModifier, CoverageModifier, load
from moe_coverage_plugin.manifest import REPORT_NAME
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.modeling.test_router_mask import OwnRouter
from tests.modifiers.harness import CHANNELS, TOP_K, compress, logits, open_linear, pruning, refusal, widths

pytestmark = pytest.mark.slow

SPARSE = [
    {"sparsity": 0.9, "block_size": 64, "inter_layer": "uniform"},
    {"sparsity": 0.9, "block_size": 64, "inter_layer": "uniform", "intra_layer": "uniform"},
    {"sparsity": 0.9, "block_size": 64, "inter_layer": "uniform", "intra_layer": "usage"},
    {"sparsity": 0.93, "block_size": 64, "inter_layer": "u_shaped"},
    {"sparsity": 0.93, "block_size": 64, "inter_layer": "loss"},
    {"sparsity": 0.93, "block_size": 64, "inter_layer": "coverage"},
    {"sparsity": 0.999, "block_size": None},
]


@pytest.mark.parametrize("options", SPARSE, ids=lambda options: "-".join(map(str, options.values())))
def test_a_budget_that_is_accepted_is_carried_out(source: Path, tmp_path: Path, options: dict[str, Any], log: Any):
    """Field case 2.10: such plans removed experts that routers need, which was found after calibration."""
    model = compress(source, pruning(**options), output_dir=str(tmp_path / "out"))
    kept = widths(model)
    assert all(sum(width > 0 for width in layer) >= TOP_K for layer in kept)
    assert sum(map(sum, kept)) <= round((1 - options["sparsity"]) * len(kept) * len(kept[0]) * CHANNELS)
    notes = json.loads((tmp_path / "out" / REPORT_NAME).read_text())["plan"]
    changed = notes["kept_for_routers"] + notes["layers_raised_for_routers"]
    assert bool(changed) == any("fewer experts than they need" in message for message in log)
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("inter_layer", ["uniform", "u_shaped", "coverage"])
def test_a_budget_that_is_too_small_names_one_that_works(
    pristine: PreTrainedModel, source: Path, tmp_path: Path, block_size: int, inter_layer: str
):
    """Field case 2.10: before the first forward pass, and what the error names differs and passes."""
    options: dict[str, Any] = {"block_size": block_size, "inter_layer": inter_layer}
    message = refusal(pristine, pruning(0.99, **options), tmp_path / "out")
    named = float(re.findall(r"for instance to ([\d.]+)", message)[0])
    assert named < 0.99
    compress(source, pruning(named, **options))


def with_router(source: Path, product: str) -> PreTrainedModel:
    model = open_linear(source)
    layer = find_moe_layers(model)[1]
    layer.moe.gate = OwnRouter(layer.router, product)
    return model


def recipe(layout: Any = "ragged", sparsity: float = 0.6) -> list[Any]:
    return [
        AttributionModifier(channel_metric="activation"),
        CoverageModifier(sparsity=sparsity, intra_layer="usage", scope="layers", inter_layer="uniform"),
        AlignmentModifier(block_size=64),
        ChannelPruningModifier(layout=layout, pictures=False),
    ]


@pytest.mark.parametrize("product", ["multiply and add", "transposed", "script", "own bias of scores"])
def test_a_router_that_cannot_be_masked_stops_before_calibration(source: Path, tmp_path: Path, product: str):
    """Field case 2.9: the message names the class and what works, which then does."""
    model = with_router(source, product)
    message = refusal(model, recipe(), tmp_path / "out")
    assert re.search(r"model\.layers\.1\.mlp\.experts .*OwnRouter.*layout='padded'|has \d+ outputs but 8", message)
    compress(model, recipe("padded"))
    compress(with_router(source, product), recipe(sparsity=0.0))


@pytest.mark.parametrize("product", ["@", "einsum", "bmm", "autograd function"])
def test_a_router_of_another_product_is_masked_in_a_run(source: Path, product: str):
    """Field case 2.9: removed experts get no tokens, whatever computes the logits."""
    model = compress(with_router(source, product), recipe())
    layer = find_moe_layers(model)[1]
    removed = [index for index, width in enumerate(layer.widths) if width == 0]
    assert removed
    ids = layer.router(torch.randn(100, 128, generator=torch.Generator().manual_seed(0)))[2]
    assert not set(ids.flatten().tolist()) & set(removed)
