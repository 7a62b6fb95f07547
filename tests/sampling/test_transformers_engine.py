"""Draws of real tiny models."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from moe_coverage_plugin.sampling.dataset import sample_text
from moe_coverage_plugin.sampling.transformers_engine import TransformersEngine
from tests.calibration.brute_force import open_stock
from tests.sampling.test_run import tokenizer_of
from tests.tiny import save_model

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]
NOTHING: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    source = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, moe_intermediate_size=64)
    return open_stock(source, linear=True)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < length:
        logits: Any = model(input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_padding_and_batches_do_not_change_what_is_drawn(model: PreTrainedModel) -> None:
    """At a temperature near zero, draws are the most probable tokens."""
    engine = TransformersEngine(model, temperature=1e-6, batch_size=3)
    assert engine(PROMPTS, NOTHING, 16, 0) == [greedy(model, prompt, 16) for prompt in PROMPTS]


def test_draws_follow_the_models_distribution_whatever_its_generation_config_says(model: PreTrainedModel) -> None:
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, temperature=0.01, repetition_penalty=3.0)
    try:
        before = model.generation_config
        drawn = TransformersEngine(model, 1.0, 500)([[3, 1, 4]] * 2000, NOTHING, 4, 0)
        assert model.generation_config is before
    finally:
        model.generation_config = own
    with torch.no_grad():
        logits: Any = model(input_ids=torch.tensor([[3, 1, 4]])).logits
    probability_V = logits[0, -1].double().softmax(-1)
    counts_V = torch.bincount(torch.tensor(drawn).flatten(), minlength=probability_V.numel())
    # five standard deviations of each count
    spread_V = (2000 * probability_V * (1 - probability_V)).sqrt()
    assert bool(((counts_V - 2000 * probability_V).abs() <= 5 * spread_V + 1).all())


def test_stops_end_documents_and_one_seed_gives_one_text(model: PreTrainedModel) -> None:
    stops = frozenset(range(0, model.config.vocab_size, 8))
    state = torch.random.get_rng_state()
    engine = TransformersEngine(model, 1.0, 4)
    drawn = engine(PROMPTS * 4, stops, 64, 7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert drawn == engine(PROMPTS * 4, stops, 64, 7) != engine(PROMPTS * 4, stops, 64, 8)
    assert any(len(ids) < 50 for ids in drawn)
    for ids in drawn:
        assert not stops & set(ids[:-1])


def test_a_data_set_for_oneshot(model: PreTrainedModel) -> None:
    data = sample_text(model, tokenizer_of(), samples=3, length=32, seed=2)
    assert [len(ids) for ids in data["input_ids"]] == [32] * 3
    assert '"seed": 2' in data.info.description
