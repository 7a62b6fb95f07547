"""Two ranks with gloo, each with its own part of the data, compute the sums, scores and samples of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from moe_coverage_plugin.calibration.gathering import gather_sums
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.gram import channel_grams
from moe_coverage_plugin.calibration.interactions import interaction_scores
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.gauss_newton import Tokens
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests import processes
from tests.calibration.brute_force import EXPERTS, batches_of, open_stock, padded_with_prompts, save_float64
from tests.calibration.routed_rows import inputs_of

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
RANKS = 2


def data_of(case: str) -> list[dict[str, Tensor]]:
    """Batches to split over ranks.

    Those of the second rank are padded, and in case ``masked`` have no targets, in case ``short`` only one token, so
    that most experts have none on this rank.
    """
    batches = batches_of(padded_with_prompts(labelled=True), 1)
    for batch in batches[1::RANKS]:
        if case == "masked":
            batch["labels"] = torch.full_like(batch["labels"], -100)
        if case == "short":
            batch["attention_mask"][:, 1:] = 0
    return batches


def scores(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    layers = find_moe_layers(model)
    observers = [LayerObserver(layer, "obs", None) for layer in layers]
    gradients = [GradientObserver(layer, "obs") for layer in layers]
    observe_batches(model, batches, observers, gradients)
    return interaction_scores(model, layers, batches, gather_sums(observers, gradients))


def sums_and_tokens(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, tuple[Tokens, Tokens]]:
    """Gram matrices, numbers of tokens, and a sample of each expert's tokens; every third token is held back."""
    layer = find_moe_layers(model)[0]
    held = [torch.arange(batch["input_ids"].numel()) % 3 == 0 for batch in batches]
    inputs = inputs_of(model, layer, batches, held)
    return channel_grams(layer, range(EXPERTS), inputs), inputs.count_tokens(), inputs.sample(range(EXPERTS), 1000)


def rank_of_two(path: str) -> None:
    directory = Path(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in ("labelled", "masked"):
        torch.save(scores(opened(directory), data_of(case)[rank::RANKS]), directory / f"{case}.{rank}")
    found = sums_and_tokens(opened(directory), data_of("short")[rank::RANKS])
    torch.save([*found[:2], [tuple(side) for side in found[2]]], directory / f"{rank}")
    dist.destroy_process_group()


def opened(directory: Path) -> Any:
    return open_stock(directory / "model", linear=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two ranks that have ended."""
    directory = tmp_path_factory.mktemp("ranks")
    save_float64(directory / "model", "qwen3_moe")
    program = "import os, sys; from tests.calibration.test_ranks import rank_of_two; rank_of_two(sys.argv[1])"
    processes.finish(processes.start_ranks(RANKS, "-c", program, directory, cwd=REPOSITORY))
    return directory


@pytest.mark.parametrize("case", ["labelled", "masked"])
def test_scores_of_obs(finished: Path, case: str):
    one_rank = scores(opened(finished), data_of(case))
    first, second = (torch.load(finished / f"{case}.{rank}") for rank in range(RANKS))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, one_rank, rtol=1e-7, atol=1e-20)
    assert torch.equal(first.argsort(dim=-1), one_rank.argsort(dim=-1))


def test_gram_matrices_and_tokens(finished: Path):
    """Also of experts that only one of the ranks has tokens of."""
    grams, counts, samples = sums_and_tokens(opened(finished), data_of("short"))
    own = sums_and_tokens(opened(finished), data_of("short")[1::RANKS])[1]
    assert 0 < int((own == 0).sum()) < EXPERTS
    ranks = [torch.load(finished / str(rank)) for rank in range(RANKS)]
    for found_grams, found_counts, found_samples in ranks:
        assert torch.equal(found_grams, ranks[0][0])
        torch.testing.assert_close(found_grams, grams, rtol=1e-12, atol=1e-15)
        assert torch.equal(found_counts, counts)
        for (x_EMH, weight_EM, count_E), expected in zip(found_samples, samples, strict=True):
            assert torch.equal(count_E, expected.count_E)
            order_EM, expected_EM = weight_EM.argsort(dim=1), expected.weight_EM.argsort(dim=1)
            for index in range(EXPERTS):
                for one, other in ((x_EMH, expected.x_EMH), (weight_EM, expected.weight_EM)):
                    torch.testing.assert_close(
                        one[index][order_EM[index]], other[index][expected_EM[index]], rtol=1e-12, atol=1e-15
                    )
