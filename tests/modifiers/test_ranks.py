"""Data-parallel calibration in real processes: two ranks make the plan of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.modifiers import rank_worker
from tests.modifiers.harness import save_tiny

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def test_two_ranks_make_the_plan_of_one(tmp_path: Path):
    """Before that, both ranks get the same samples, which stops with an error. Their models are equal to the bit."""
    source = save_tiny(tmp_path / "source", moe_intermediate_size=128)
    rank_worker.main(str(source), str(tmp_path))
    processes.finish(processes.start_ranks(2, "-m", "tests.modifiers.rank_worker", source, tmp_path, cwd=REPOSITORY))
    for rank in range(2):
        assert "ranks calibrate on the same" in (tmp_path / f"rank{rank}of2.refused").read_text()
    names = ("rank0of1", "rank0of2", "rank1of2")
    alone, *ranks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    # widths, order of channels, routed tokens, and what the scores were measured on
    assert ranks == [alone, alone]
    scores, *parts = (torch.load(tmp_path / f"{name}.pt") for name in names)
    assert torch.equal(*parts)
    torch.testing.assert_close(parts[0], scores, rtol=1e-7, atol=0)
    # reconstruction and GPTQ have changed the experts, in the same way on both ranks
    weights = [(tmp_path / f"{name}.weights").read_text() for name in names]
    assert weights[1] == weights[2]
