"""Sends an engine to sleep, as a program: vLLM's allocator for that serves one engine of a process.

python -m tests.serving.sleeping CHECKPOINT    exits with status 0 if all of it holds

Bytes are those of the card, so nothing else may allocate there meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.serving.agreement import assert_agrees
from tests.serving.engine import expected_logprobs, open_engine, prompt_logprobs
from tests.serving.test_features import decode
from tests.serving.test_gpus import DTYPE, GRAPHS, MEDIAN_BFLOAT16

BLOCK = 16


def assert_as_likely(llm: Any, prompt_ids: list[int], found: tuple[list[int], list[float], int]) -> None:
    """Decoded tokens are as likely as the same tokens as a prompt, which is computed without a cache of prefixes."""
    tokens, logprobs, _ = found
    as_prompt = prompt_logprobs(llm, prompt_ids + tokens)[len(prompt_ids) - 1 :]
    assert (torch.tensor(logprobs) - torch.tensor(as_prompt)).abs().median() <= MEDIAN_BFLOAT16


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def main() -> None:
    """Compare outputs before and after, and of prompts that the cache has, computed in parts."""
    path = Path(sys.argv[1])
    prompt_ids = expected_logprobs(path)[0]
    options = {"enable_sleep_mode": True, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    batch = GRAPHS["max_num_seqs"]
    llm = open_engine(path, **GRAPHS | options, block_size=BLOCK, max_num_batched_tokens=batch)
    before = prompt_logprobs(llm, prompt_ids)
    assert_agrees(path, before, DTYPE)
    first = decode(llm, prompt_ids)
    assert_as_likely(llm, prompt_ids, first)
    again = decode(llm, prompt_ids)
    assert again[2] == (len(prompt_ids) - 1) // BLOCK * BLOCK
    assert_as_likely(llm, prompt_ids, again)
    awake = free_bytes()
    llm.sleep(level=1)
    # the cache alone
    assert free_bytes() - awake >= GRAPHS["kv_cache_memory_bytes"]
    llm.wake_up()
    assert prompt_logprobs(llm, prompt_ids) == before
    assert decode(llm, prompt_ids)[:2] == first[:2]
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
