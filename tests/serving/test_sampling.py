"""Text that a model writes itself, drawn by a real engine."""

from typing import Any

import pytest
import torch

from moe_coverage_plugin.sampling.vllm_engine import VllmEngine
from tests.serving.engine import checkpoint_path, open_engine

pytestmark = pytest.mark.engine

PROMPT = [3, 1, 4, 1, 5]
DRAWS = 1500


@pytest.fixture(scope="module")
def llm() -> Any:
    return open_engine(checkpoint_path("ragged_fp32"), max_logprobs=-1, max_num_seqs=64)


def test_draws_follow_the_distribution_of_the_model(llm: Any) -> None:
    from vllm import SamplingParams

    (output,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1, temperature=1.0, logprobs=-1))
    probability_V = torch.zeros(512, dtype=torch.float64)
    for token, logprob in output.outputs[0].logprobs[0].items():
        probability_V[token] = logprob.logprob
    probability_V = probability_V.exp()
    drawn = VllmEngine(llm, 1.0)([PROMPT] * DRAWS, frozenset(), len(PROMPT) + 1, seed=0)
    counts_V = torch.bincount(torch.tensor(drawn).flatten(), minlength=512)
    # five standard deviations of each count
    spread_V = (DRAWS * probability_V * (1 - probability_V)).sqrt()
    assert float(probability_V.sum()) == pytest.approx(1, abs=1e-4)
    assert bool(((counts_V - DRAWS * probability_V).abs() <= 5 * spread_V + 1).all())


def test_stops_end_documents_and_one_seed_gives_one_text(llm: Any) -> None:
    stops = frozenset(range(0, 512, 16))
    engine = VllmEngine(llm, 1.0)
    prompts = [PROMPT[:length] for length in (1, 3, 5)] * 3
    drawn = engine(prompts, stops, 40, seed=7)
    assert drawn == engine(prompts, stops, 40, seed=7) != engine(prompts, stops, 40, seed=8)
    assert any(len(ids) < 30 for ids in drawn)
    for prompt, ids in zip(prompts, drawn, strict=True):
        assert not stops & set(ids[:-1])
        assert len(prompt) + len(ids) == 40 or ids[-1] in stops
    assert len({tuple(ids) for ids in drawn}) == len(drawn)
