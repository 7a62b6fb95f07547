"""Sums of statistics over two processes with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.next_token import check_predicted
from moe_coverage_plugin.manifest import CoverageError

pytestmark = pytest.mark.slow

RANKS = 2


def statistics_of(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "channel_sums_EI": torch.rand(4, 32, dtype=torch.float64, generator=generator) * 1e7,
        "tokens_E": torch.randint(0, 100, (4,), generator=generator).double(),
    }


def exchange(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    for name, tensor in sum_over_ranks(statistics_of(rank)).items():
        torch.save(tensor, Path(directory) / f"{name}.{rank}")
    with_target, without = ({"input_ids": torch.ones(1, length, dtype=torch.int64)} for length in (2, 1))
    check_predicted([without if rank == 0 else with_target], "batches", "nothing")
    with pytest.raises(CoverageError, match="no token for the model to predict"):
        check_predicted([without], "batches", "nothing")
    (Path(directory) / f"error.{rank}").touch()
    dist.destroy_process_group()


def test_all_ranks_get_bit_identical_sums(tmp_path):
    # ranks are forked from a process that has imported the toolkit, so that it is imported only once
    multiprocessing.set_forkserver_preload(["moe_coverage_plugin.calibration.distributed"])
    multiprocessing.start_processes(exchange, args=(str(tmp_path),), nprocs=RANKS, start_method="forkserver")
    parts = [statistics_of(rank) for rank in range(RANKS)]
    for name in parts[0]:
        found = [torch.load(tmp_path / f"{name}.{rank}") for rank in range(RANKS)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], parts[0][name] + parts[1][name])
    assert all((tmp_path / f"error.{rank}").exists() for rank in range(RANKS)), "an error was not raised on all ranks"


def test_without_a_process_group_nothing_changes():
    tensors = statistics_of(0)
    assert sum_over_ranks(tensors) is tensors
    assert all(torch.equal(tensors[name], value) for name, value in statistics_of(0).items())
