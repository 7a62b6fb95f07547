"""Generate from a pruned checkpoint with vLLM. Runs in the serving environment.

python examples/generate.py out/demo/p_q4
"""

from __future__ import annotations

import argparse
import os

# in GiB, read when vLLM is imported; enough for a small model on a machine without a GPU
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams

PROMPTS = (
    "import os\n\ndef read_",
    "class TestParser(unittest.TestCase):\n    def test_",
    "Return the absolute value of",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    llm = LLM(args.checkpoint, enforce_eager=True, max_model_len=512)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    print(f"\nvLLM, from {args.checkpoint}:\n")
    for output in outputs:
        print(f"--- {output.prompt!r}\n{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
