"""Two ranks give the same result as one rank that accumulates twice the number of batches."""

from __future__ import annotations

import os

import pytest
import torch

from moe_coverage_plugin import Manifest, finetune
from moe_coverage_plugin.recovery import RecoveryOptions
from tests import processes
from tests.checkpoint.runs import tensors
from tests.recovery.cycles import FAST

pytestmark = pytest.mark.slow

VALUES = FAST | {"steps": 4, "batch_size": 3, "balance": 0.1, "save_every": 2}
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from tests.recovery.cycles import cycles
from moe_coverage_plugin import RecoveryOptions, finetune
done = finetune(sys.argv[1], cycles(seed=1), sys.argv[2], RecoveryOptions(**eval(sys.argv[3])))
print("writes", done.writes)
"""


def test_two_ranks_equal_one_that_accumulates(pruned, text, tmp_path):
    # for CPUs only
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = processes.start_ranks(2, "-c", PROGRAM, pruned, tmp_path / "two", repr(VALUES), env=environment)
    processes.finish(ranks)
    assert [rank.stdout.splitlines()[-1] for rank in ranks] == ["writes True", "writes False"]
    finetune(pruned, text, tmp_path / "one", RecoveryOptions(**VALUES | {"accumulation": 2}))
    before, one, two = tensors(pruned), tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name, tensor in one.items():
        # AdamW's first steps depend on the signs of tiny gradients, so another order of sums can be visible
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    changed = [name for name, tensor in before.items() if float((one[name] - tensor).abs().max()) > 1e-2]
    assert changed, "training must change weights by more than the tolerance above"
    manifest = Manifest.from_checkpoint(tmp_path / "two")
    assert manifest is not None
    assert manifest.provenance["recovery"][0]["ranks"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
