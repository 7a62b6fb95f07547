"""One data-parallel rank of a real ``oneshot``, started by ``torchrun`` from test_ranks.py, or alone."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from compressed_tensors.distributed import init_dist
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from torch import distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import AttributionModifier, CoverageError, LayerwiseGPTQModifier, recommended_recipe
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.tiny import four_bits, token_batches


def main(source: str, output: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1 and torch.accelerator.is_available():
        init_dist()
    elif ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    dataset = token_batches(samples=8, length=24, padded=True)
    name = f"rank{rank}of{ranks}"
    if ranks > 1:
        # all ranks get all samples
        try:
            calibrate(source, dataset)
        except CoverageError as error:
            Path(output).joinpath(f"{name}.refused").write_text(str(error))
    model, attribution = calibrate(source, dataset.shard(ranks, rank))
    scores = attribution.measured
    result = {
        "widths": [layer.widths for layer in find_moe_layers(model)],
        "order": torch.sort(scores.channels_LEI, dim=-1, descending=True, stable=True).indices.tolist(),
        "tokens": scores.tokens_LE.tolist(),
        "calibration": attribution.provenance,
    }
    Path(output).joinpath(f"{name}.json").write_text(json.dumps(result))
    # which samples are held back from reconstruction depends on the number of ranks, hence not in the result
    Path(output).joinpath(f"{name}.weights").write_text(weights_hash(model))
    torch.save(scores.channels_LEI, Path(output) / f"{name}.pt")
    if ranks > 1:
        dist.destroy_process_group()


def weights_hash(model: PreTrainedModel) -> str:
    """Of all weights, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def calibrate(source: str, dataset: Dataset) -> tuple[PreTrainedModel, AttributionModifier]:
    # in float64, because the order of sums, which depends on ranks, must not change the order of channels
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    linearize_moe(model)
    quantizer = LayerwiseGPTQModifier(**four_bits(64), weight_observer="imatrix_mse")
    recipe = [*recommended_recipe(0.5, block_size=64, scheme=None), quantizer]
    attribution = recipe[0]
    assert isinstance(attribution, AttributionModifier)
    oneshot(model=model, dataset=dataset, num_calibration_samples=len(dataset), recipe=recipe)
    return model, attribution


if __name__ == "__main__":
    main(*sys.argv[1:])
