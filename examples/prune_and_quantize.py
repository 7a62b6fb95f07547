"""Prune a model and quantize the rest to 4 bits, by a recipe file. Runs in the compressing environment.

python examples/prune_and_quantize.py --output out/pruned_q4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoTokenizer

from moe_coverage_plugin import recipe_path

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(MINI_MOE), help="directory of a model, or its name on the hub")
parser.add_argument("--data", type=Path, default=MINI_MOE / "calibration.txt", help="text like the model will see")
parser.add_argument("--recipe", default="recommended_p25_q4", help="name of a recipe of the package, or a YAML file")
parser.add_argument("--sparsity", type=float, help="fraction to remove, instead of the recipe's")
parser.add_argument("--windows", type=int, default=16, help="how many; take 512 for a real model")
parser.add_argument("--window-tokens", type=int, default=128, help="take 2048 for a real model")
parser.add_argument("--output", default="out/pruned_q4", help="new or empty directory")
args = parser.parse_args()

# windows of token ids, evenly spread over the text
tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = torch.tensor(tokenizer(args.data.read_text(encoding="utf-8"))["input_ids"])
windows = ids[: len(ids) - len(ids) % args.window_tokens].reshape(-1, args.window_tokens)
windows = windows[torch.linspace(0, len(windows) - 1, min(args.windows, len(windows))).long()]

oneshot(
    model=args.model,
    dataset=Dataset.from_dict({"input_ids": windows.tolist()}),
    recipe=args.recipe if Path(args.recipe).is_file() else recipe_path(args.recipe),
    # overrides fields of the pruning modifiers, not of the quantizer
    recipe_args={} if args.sparsity is None else {"sparsity": args.sparsity},
    num_calibration_samples=len(windows),
    batch_size=16,
    moe_calibrate_all_experts="gptq" in args.recipe,  # llm-compressor's GPTQ needs tokens for every expert
    output_dir=args.output,
)

before, after = (
    sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) for folder in (args.model, args.output)
)
if before:
    print(f"{before / 2**20:.2f} MiB became {after / 2**20:.2f} ({after / before:.1%})")
print(f"Wrote {args.output}; in vLLM's environment: vllm serve {args.output}")
