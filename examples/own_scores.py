"""Prune by scores of your own: any number of at least 0 for every channel. Runs in the compressing environment.

python examples/own_scores.py --output out/own
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoTokenizer

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageModifier,
    load_scores,
    save_scores,
)

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(MINI_MOE), help="directory of a model, or its name on the hub")
parser.add_argument("--data", type=Path, default=MINI_MOE / "calibration.txt", help="text to count routed tokens on")
parser.add_argument("--output", type=Path, default=Path("out/own"), help="new or empty directory")
args = parser.parse_args()
args.output.parent.mkdir(parents=True, exist_ok=True)
measured, own = (
    str(args.output.with_name(f"{args.output.name}.{name}.safetensors")) for name in ("measured", "scores")
)

# One forward pass measures the rest of a score file: routed tokens, routing weights, importance of experts.
tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = torch.tensor(tokenizer(args.data.read_text(encoding="utf-8"))["input_ids"][: 16 * 128]).reshape(16, 128)
model = oneshot(
    model=args.model,
    dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
    recipe=[AttributionModifier(channel_metric="activation", save_scores=measured)],
    batch_size=16,
    moe_calibrate_all_experts=False,
)
scores, provenance = load_scores(measured)

# Your own rule. Here: the product of the norms of a channel's three weights, times the routing weight of its expert.
rows = []
for layer, name in enumerate(scores.names):
    for expert, mlp in enumerate(child for child in model.get_submodule(name) if hasattr(child, "down_proj")):
        norms = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
        rows.append(norms.detach().double() * scores.routing_weight_sum_LE[layer, expert])
own_channels = torch.stack(rows).reshape(scores.channels_LEI.shape)
mine = replace(scores, channels_LEI=own_channels, channel_metric="own")
save_scores(own, mine, provenance | {"rule": "product of norms times routing weight"})

recipe = [
    AttributionModifier(scores=own),
    CoverageModifier(sparsity=0.25),
    AlignmentModifier(block_size=64),
    ChannelPruningModifier(reconstruct=False),  # reconstruction needs a dataset
]
oneshot(model=model, recipe=recipe, output_dir=str(args.output))
print(f"Wrote {own}, to plan from, and {args.output}")
