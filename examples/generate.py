"""Generate from a pruned checkpoint with vLLM. Runs in the serving environment.

Progress and the generated text go to the screen, vLLM's messages to ``generate.log`` in the working directory or where
``--log`` says.

    python examples/generate.py out/demo/p_q4
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

# in GiB, read when vLLM is imported; enough for a small model on a machine without a GPU
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PROMPTS = (
    "import os\n\ndef read_",
    "class TestParser(unittest.TestCase):\n    def test_",
    "Return the absolute value of",
)


def log_to(path: Path) -> TextIO:
    """Write what this process and vLLM's other processes print to a file.

    ``sys.stderr``, which has the progress bars, stays the screen.

    Returns:
        What standard output was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    output, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w", buffering=1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.captureWarnings(True)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--log", type=Path, default=Path("generate.log"), help="file for vLLM's messages")
    args = parser.parse_args()

    print(f"vLLM starts (about a minute without a GPU); its messages are written to {args.log}", flush=True)
    screen = log_to(args.log)
    from vllm import LLM, SamplingParams

    llm = LLM(args.checkpoint, enforce_eager=True, max_model_len=512)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    print(f"\nvLLM, from {args.checkpoint}:\n", file=screen)
    for output in outputs:
        print(f"--- {output.prompt!r}\n{output.prompt}{output.outputs[0].text}\n", file=screen)


if __name__ == "__main__":
    main()
