"""Scores do not depend on padding, on who builds the batches, and on their order."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.calibration.calibration_set import check_batches, data_hash
from moe_coverage_plugin.calibration.next_token import next_tokens
from tests.calibration.brute_force import assert_scores, expected, observe, open_stock, save_float64
from tests.tiny import VOCAB

pytestmark = pytest.mark.slow

LENGTHS = (20, 7, 13, 20, 3, 16)
PAD = 1


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_float64(tmp_path_factory.mktemp("source"), "qwen2_moe")


@pytest.fixture(scope="module")
def unpadded(source, texts):
    """Expected scores of the same texts without padding."""
    batches = [{"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]} for text in texts]
    return expected(open_stock(source), batches)


def padded(texts, side: str, length: int = max(LENGTHS)) -> list[dict[str, list[int]]]:
    samples = []
    for text in texts:
        fill, ones = [PAD] * (length - len(text)), [1] * len(text)
        zeros = [0] * len(fill)
        ids = text.tolist()
        ids, mask = (ids + fill, ones + zeros) if side == "right" else (fill + ids, zeros + ones)
        samples.append({"input_ids": ids, "attention_mask": mask})
    return samples


def collate(samples):
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


RUNS = [
    {"batch_size": 1},
    {"batch_size": 3},
    {"batch_size": 3, "moe_calibrate_all_experts": False},
    {"batch_size": 3, "pipeline": "basic"},
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_padded_on_the_right_equals_unpadded(source, texts, unpadded, run):
    assert_scores(observe(source, Dataset.from_list(padded(texts, "right")), **run), unpadded)


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("metric", ["activation", "fisher"])
def test_padded_on_the_left_equals_unpadded(texts, tmp_path, metric, run):
    """Left padding shifts positions, which does not change rotary attention.

    The model is in float32, because eager attention of transformers in float64 outputs NaN for rows that are entirely
    masked.
    """
    source = save_float64(tmp_path, "qwen3_moe")
    model = open_stock(source).float()
    model.save_pretrained(source)
    attribution = {"channel_metric": metric, "expert_importance": "nll_squared", "layer_noise": 0.5}
    samples = [{"input_ids": text.tolist(), "attention_mask": [1] * len(text)} for text in texts]
    unpadded = observe(source, Dataset.from_list(samples), attribution, batch_size=1)
    scores = observe(source, Dataset.from_list(padded(texts, "left")), attribution, **run)
    assert torch.equal(scores.tokens_LE, unpadded.tokens_LE)
    importances = ("first_order_LE", "second_order_LE", "routing_weight_sum_LE", "nll_signed_LE", "nll_absolute_LE")
    for name in ("channels_LEI", *importances, "nll_squared_LE", "layer_loss_L"):
        found, wanted = getattr(scores, name), getattr(unpadded, name)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()), msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_input_nor_target_of_a_prediction(texts, side):
    batch = collate(padded(texts, side))
    assert int((next_tokens(batch) != -100).sum()) == sum(LENGTHS) - len(LENGTHS)
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    assert torch.equal(next_tokens(batch | {"labels": labels}), next_tokens(batch))


def test_unpadded_samples_of_unequal_length(source, texts, unpadded):
    samples = [{"input_ids": text.tolist(), "attention_mask": [1] * len(text)} for text in texts]
    assert_scores(observe(source, Dataset.from_list(samples), batch_size=1), unpadded)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_user_defined_loader_that_shuffles(source, texts, unpadded, batch_size):
    samples = padded(texts, "right")
    loader = DataLoader(samples, batch_size=batch_size, shuffle=True, collate_fn=collate)
    assert_scores(observe(source, loader), unpadded)


def test_data_hash_depends_on_samples_but_not_on_their_order():
    first, second = {"input_ids": torch.tensor([[1, 2]])}, {"input_ids": torch.tensor([[3, 4]])}
    assert data_hash([first, second]) == data_hash([second, first])
    assert data_hash([first, second]) != data_hash([first, first])


@pytest.mark.parametrize("batches", [None, [], [{"labels": torch.ones(1)}], [{"input_ids": torch.ones(1, 0)}]])
def test_an_empty_calibration_set_is_an_error(batches):
    """Case 31: a calibration set without tokens would give scores of zero."""
    with pytest.raises(CoverageError):
        check_batches(batches)
