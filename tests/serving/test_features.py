"""Features of vLLM that change how tokens are scheduled, cached or chosen give the outputs of a plain engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.serving.agreement import LARGEST_FLOAT32, assert_agrees
from tests.serving.engine import checkpoint_path, expected_logprobs, prompt_logprobs
from tests.serving.test_engine import engine_on

pytestmark = pytest.mark.engine

NAME = "ragged_w4a16"
NEW_TOKENS = 24
BLOCK = 32
"""Tokens of a block of the cache, of which entire ones are shared between requests."""


def decode(llm: Any, prompt_ids: list[int], **options: Any) -> tuple[list[int], list[float], int]:
    """Greedy tokens after a prompt, their log-probabilities, and how many tokens of the prompt came from the cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        **{"temperature": 0, "ignore_eos": True, "logprobs": 0, "max_tokens": NEW_TOKENS} | options
    )
    output = llm.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)[0]
    [completion] = output.outputs
    logprobs = [chosen[token].logprob for chosen, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    return list(completion.token_ids), logprobs, output.num_cached_tokens


@pytest.fixture(scope="module")
def plain() -> tuple[list[int], tuple[list[int], list[float], int]]:
    """A prompt that repeats itself, and its continuation by an engine with none of the features."""
    path = checkpoint_path(NAME)
    prompt_ids = expected_logprobs(path)[0]
    options = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    with engine_on(path, **options) as llm:
        return prompt_ids, decode(llm, prompt_ids)


def assert_same(found: tuple[list[int], list[float], int], expected: tuple[list[int], list[float], int]) -> None:
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=LARGEST_FLOAT32)


def test_prefix_caching_chunked_prefill_and_structured_output(
    plain: tuple[list[int], tuple[list[int], list[float], int]],
) -> None:
    """In one engine, which schedules eight tokens at once, so that the prompt takes eight steps.

    Structured output is compared with a list of the tokens that it allows.
    """
    from vllm.sampling_params import StructuredOutputsParams

    prompt_ids, expected = plain
    path = checkpoint_path(NAME, "tokenizer.json")
    # structured output needs a tokenizer
    options = {"skip_tokenizer_init": False, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    with engine_on(path, **options, block_size=BLOCK, max_num_batched_tokens=8) as llm:
        assert_agrees(path, prompt_logprobs(llm, prompt_ids))
        # log-probabilities of a prompt are computed without the cache
        assert_same(decode(llm, prompt_ids), expected)
        again = decode(llm, prompt_ids)
        assert_same(again, expected)
        assert again[2] == (len(prompt_ids) - 1) // BLOCK * BLOCK
        words = ["w5", "w7", "w8"]
        structured = StructuredOutputsParams(regex=f"({'|'.join(words)}){{4}}")
        found, *_ = decode(llm, prompt_ids, structured_outputs=structured, ignore_eos=False)
        allowed = llm.get_tokenizer().convert_tokens_to_ids(words)
        assert found[:4] == decode(llm, prompt_ids, allowed_token_ids=allowed, max_tokens=4)[0]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation(plain: tuple[list[int], tuple[list[int], list[float], int]], method: str) -> None:
    """By tokens of the prompt, and by another pruned model."""
    prompt_ids, expected = plain
    options: dict[str, Any] = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(checkpoint_path("ragged_gptq_a64"))},
    }
    speculative = {"method": method, "num_speculative_tokens": 3} | options[method]
    with engine_on(checkpoint_path(NAME), speculative_config=speculative) as llm:
        assert_same(decode(llm, prompt_ids), expected)
