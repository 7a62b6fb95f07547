"""A job with offloaded weights writes the checkpoint of the job in memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageModifier,
    LayerwiseGPTQModifier,
    Manifest,
)
from moe_coverage_plugin.checkpoint.opening import open_model
from tests.checkpoint.runs import tensors
from tests.modifiers.harness import compress, open_linear, save_tiny
from tests.tiny import add_tokenizer, four_bits, token_batches

pytestmark = pytest.mark.slow

BLOCK = 16
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "num_hidden_layers": 3}


def job(source: Path, directory: Path, offloaded: bool) -> Path:
    """The checkpoint of the recommended recipe with GPTQ."""
    (directory / "disk").mkdir(parents=True)
    model = open_model(str(source), "disk", directory / "disk") if offloaded else open_linear(source)
    recipe = [
        AttributionModifier(),
        CoverageModifier(sparsity=0.5),
        AlignmentModifier(block_size=BLOCK),
        ChannelPruningModifier(pictures=False),
        LayerwiseGPTQModifier(**four_bits(BLOCK)),
    ]
    data = token_batches(samples=24, length=48, padded=True)
    output = directory / "out"
    compress(model, recipe, dataset=data, batch_size=8, tokenizer=str(source), output_dir=str(output))
    return output


def test_the_checkpoint_is_that_of_the_job_in_memory(tmp_path: Path):
    source = add_tokenizer(save_tiny(tmp_path / "model", **SHAPE))
    memory, offloaded = (job(source, tmp_path / str(each), each) for each in (False, True))
    manifests = [Manifest.from_checkpoint(each) for each in (memory, offloaded)]
    assert manifests[0] is not None
    assert manifests[1] is not None
    assert manifests[1].widths == manifests[0].widths
    assert any(len(set(widths)) > 1 for widths in manifests[0].widths.values())
    expected, found = tensors(memory), tensors(offloaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
