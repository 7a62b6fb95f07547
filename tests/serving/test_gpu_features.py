"""Features of vLLM on a card, under graphs. Run by hand, because CI has no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.adapters import make_adapter, merge
from tests.serving.agreement import assert_agrees
from tests.serving.engine import checkpoint_path, expected_logprobs, prompt_logprobs
from tests.serving.test_engine import engine_on
from tests.serving.test_features import decode
from tests.serving.test_gpus import DTYPE, GRAPHS, MEDIAN_BFLOAT16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAMES = ["ragged_w4a16", "ragged_bf16"]
BLOCK = 16


def assert_as_likely(llm: Any, prompt_ids: list[int], found: tuple[list[int], list[float], int]) -> None:
    """Decoded tokens are as likely as the same tokens as a prompt, which is computed without a cache of prefixes."""
    tokens, logprobs, _ = found
    as_prompt = prompt_logprobs(llm, prompt_ids + tokens)[len(prompt_ids) - 1 :]
    assert (torch.tensor(logprobs) - torch.tensor(as_prompt)).abs().median() <= MEDIAN_BFLOAT16


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("name", NAMES)
def test_sleep_prefix_caching_and_chunked_prefill(name: str) -> None:
    """Weights leave the card and come back with the same bits, and captured graphs replay with them."""
    path = checkpoint_path(name)
    prompt_ids = expected_logprobs(path)[0]
    options = GRAPHS | {"enable_sleep_mode": True, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    with engine_on(path, **options, block_size=BLOCK, max_num_batched_tokens=GRAPHS["max_num_seqs"]) as llm:
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


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("name", NAMES)
def test_speculation(name: str, method: str) -> None:
    path = checkpoint_path(name)
    prompt_ids = expected_logprobs(path)[0]
    options: dict[str, Any] = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(checkpoint_path("ragged_gptq"))},
    }
    speculative = {"method": method, "num_speculative_tokens": 3} | options[method]
    with engine_on(path, **GRAPHS, speculative_config=speculative) as llm:
        assert_as_likely(llm, prompt_ids, decode(llm, prompt_ids))


def test_structured_output() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    path = checkpoint_path("ragged_w4a16", "tokenizer.json")
    prompt_ids = expected_logprobs(path)[0]
    words = ["w5", "w7", "w8"]
    structured = StructuredOutputsParams(regex=f"({'|'.join(words)}){{4}}")
    with engine_on(path, **GRAPHS, skip_tokenizer_init=False) as llm:
        found, *_ = decode(llm, prompt_ids, structured_outputs=structured, ignore_eos=False)
        allowed = llm.get_tokenizer().convert_tokens_to_ids(words)
        assert found[:4] == decode(llm, prompt_ids, allowed_token_ids=allowed, max_tokens=4)[0]


@pytest.mark.parametrize("name", [*NAMES, "ragged_deepseek_v3"])
def test_adapters(tmp_path: Path, name: str) -> None:
    """Log-probabilities of the merged checkpoint, which has 16-bit attention; both are rounded to bfloat16."""
    from vllm.lora.request import LoRARequest

    path = checkpoint_path(name)
    prompt_ids = expected_logprobs(path)[0]
    latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    targets = latent if "deepseek" in name else ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = make_adapter(path, tmp_path / "adapter", targets)
    request = LoRARequest("adapter", 1, str(adapter))
    with engine_on(path, **GRAPHS, enable_lora=True) as llm:
        assert_agrees(path, prompt_logprobs(llm, prompt_ids), DTYPE)
        found = torch.tensor(prompt_logprobs(llm, prompt_ids, request))
    with engine_on(merge(path, adapter, tmp_path / "merged"), **GRAPHS) as llm:
        merged = torch.tensor(prompt_logprobs(llm, prompt_ids))
    assert (found - merged).abs().median() <= 2 * MEDIAN_BFLOAT16
