"""Open a pruned 16-bit checkpoint in NF4 and generate. Runs in the compressing environment, with the extra nf4.

python examples/nf4.py out/pruned
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, BitsAndBytesConfig

from moe_coverage_plugin import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", help="directory of a pruned checkpoint in 16 bit")
parser.add_argument("--prompt", default="import os")
parser.add_argument("--tokens", type=int, default=32)
args = parser.parse_args()

device = torch.accelerator.current_accelerator() or torch.device("cpu")
# bitsandbytes computes in float32 by default
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = load(args.checkpoint, torch.bfloat16, quantization_config=config).to(device)
tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)

prompt = tokenizer(args.prompt, return_tensors="pt").to(device)
output = model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False)
print(tokenizer.decode(output[0]))
