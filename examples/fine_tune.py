"""Fine-tune a pruned checkpoint by distillation. Runs in the compressing environment, with the extra finetune.

python examples/fine_tune.py out/pruned --output out/recovered
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_coverage_plugin import RecoveryOptions, finetune

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", help="directory of a pruned checkpoint, in 16 bit or 4")
parser.add_argument("--teacher", default=str(MINI_MOE), help="directory of the model that was pruned")
parser.add_argument("--data", nargs="+", default=[str(MINI_MOE / "calibration.txt")], help="files of text")
parser.add_argument("--steps", type=int, default=20, help="take a thousand for a real model")
parser.add_argument("--window-tokens", type=int, default=128, help="take 2048 for a real model")
parser.add_argument("--output", default="out/recovered", help="new or empty directory")
args = parser.parse_args()

options = RecoveryOptions(
    expert_lr=3e-3,  # small models need a higher rate than the default of 1e-4, which is the paper's
    steps=args.steps,
    batch_size=8,
    sequence_length=args.window_tokens,
    held_out=0.02,  # fraction at the end of the text for the held-out loss
)
done = finetune(args.checkpoint, args.data, args.output, options, teacher=args.teacher)
print(f"Held-out loss {done.before:.4f}, after {done.steps} steps {done.after:.4f} nats per token")
print(f"Wrote {args.output}, in 16 bit, with the same widths and the loss curve")
