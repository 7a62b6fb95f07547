"""Remove a quarter of the channels inside the experts of a model, in 16 bit. Runs in the compressing environment.

python examples/prune.py --output out/pruned
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoTokenizer

from moe_coverage_plugin import Manifest, recommended_recipe

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(MINI_MOE), help="directory of a model, or its name on the hub")
parser.add_argument("--data", type=Path, default=MINI_MOE / "calibration.txt", help="text like the model will see")
parser.add_argument("--sparsity", type=float, default=0.25, help="fraction of the expert channels to remove")
parser.add_argument("--windows", type=int, default=16, help="how many; take 512 for a real model")
parser.add_argument("--window-tokens", type=int, default=128, help="take 2048 for a real model")
parser.add_argument("--output", default="out/pruned", help="new or empty directory")
args = parser.parse_args()

# windows of token ids, evenly spread over the text
tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = torch.tensor(tokenizer(args.data.read_text(encoding="utf-8"))["input_ids"])
windows = ids[: len(ids) - len(ids) % args.window_tokens].reshape(-1, args.window_tokens)
windows = windows[torch.linspace(0, len(windows) - 1, min(args.windows, len(windows))).long()]

oneshot(
    model=args.model,
    dataset=Dataset.from_dict({"input_ids": windows.tolist()}),
    # scores from passes forward, backward and forward, widths in blocks of 64 channels, then reconstruction
    recipe=recommended_recipe(args.sparsity, block_size=64, scheme=None),
    num_calibration_samples=len(windows),
    batch_size=16,
    moe_calibrate_all_experts=False,  # scores count routed tokens only
    output_dir=args.output,
)

manifest = Manifest.from_checkpoint(args.output)
assert manifest is not None, "a pruned checkpoint has a manifest"
for name, widths in manifest.widths.items():
    print(f"{name}: {sum(widths)} channels of {len(widths) * manifest.intermediate_size}, widths {widths}")
print(f"Wrote {args.output}: see its README.md, or moe-coverage inspect {args.output}")
