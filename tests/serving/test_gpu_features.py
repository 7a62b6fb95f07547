"""Features of vLLM on a card, under graphs. Run by hand, because CI has no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tests.serving.adapters import make_adapter, merge
from tests.serving.agreement import assert_agrees
from tests.serving.engine import REPOSITORY, checkpoint_path, expected_logprobs, prompt_logprobs
from tests.serving.sleeping import assert_as_likely
from tests.serving.test_engine import engine_on
from tests.serving.test_features import decode
from tests.serving.test_gpus import DTYPE, GRAPHS, MEDIAN_BFLOAT16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAMES = ["ragged_w4a16", "ragged_bf16"]


@pytest.mark.parametrize("name", NAMES)
def test_sleep_prefix_caching_and_chunked_prefill(name: str) -> None:
    """Weights leave the card and come back with the same bits, and captured graphs replay with them."""
    done = processes.run("-m", "tests.serving.sleeping", checkpoint_path(name), cwd=REPOSITORY)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("name", NAMES)
def test_speculation(name: str, method: str) -> None:
    path = checkpoint_path(name)
    prompt_ids = expected_logprobs(path)[0]
    options: dict[str, Any] = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(checkpoint_path("ragged_gptq_a64"))},
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
