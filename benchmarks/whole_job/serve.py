"""Opens a checkpoint in vLLM and generates one token. Runs in an environment with vLLM.

python -m benchmarks.whole_job.serve CHECKPOINT RESULT.json OPTIONS SEED
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.resident import resident

PROMPT_TOKENS = 128


def measure(checkpoint: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the phases, with memory of the process so far; that of the GPU contains the cache of keys and values."""
    phases: list[dict[str, Any]] = []
    start = time.monotonic()

    def done(name: str) -> None:
        nonlocal start
        now = time.monotonic()
        cuda = torch.cuda.is_available()
        phases.append(
            {
                "name": name,
                "done": True,
                "seconds": now - start,
                "parts": {},
                "gpu_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
                "gpu_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
                "host_peak_bytes": resident().peak,
                "host_anonymous_bytes": resident().anonymous,
                "written_bytes": 0,
            }
        )
        start = now

    llm = LLM(checkpoint, skip_tokenizer_init=True, **options)
    done("opening in vLLM")
    vocabulary = llm.model_config.get_vocab_size()
    ids = random.Random(seed).choices(range(2, vocabulary), k=PROMPT_TOKENS)
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([{"prompt_token_ids": ids}], one, use_tqdm=False)
    done("first token")
    return {"phases": phases, "serving_versions": {"vllm": vllm.__version__, "torch": torch.__version__}}


if __name__ == "__main__":
    checkpoint, result, options, seed = sys.argv[1:]
    Path(result).write_text(json.dumps(measure(checkpoint, json.loads(options), int(seed))))
