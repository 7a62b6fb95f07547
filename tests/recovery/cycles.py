"""Text in which the next token mostly depends on the last one."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset

from tests.tiny import VOCAB

LENGTH = 32
# learning rates for a few steps
FAST: dict[str, Any] = {
    "sequence_length": LENGTH,
    "batch_size": 4,
    "steps": 8,
    "expert_rank": 8,
    "expert_lr": 1e-2,
    "router_lr": 1e-2,
    "evaluate_every": 4,
    "held_out": 0.2,
}


def cycles(seed: int, windows: int = 40) -> Dataset:
    """Token ids that follow a cycle through a part of the vocabulary, with random jumps at 5 % of tokens."""
    follower = torch.randperm(60, generator=torch.Generator().manual_seed(0)) + 2
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(windows):
        row = [int(torch.randint(2, 62, (1,), generator=generator))]
        while len(row) < LENGTH:
            jump = float(torch.rand((), generator=generator)) < 0.05
            new = int(torch.randint(2, 62, (1,), generator=generator))
            row.append(new if jump else int(follower[row[-1] - 2]))
        rows.append(row)
    assert max(map(max, rows)) < VOCAB
    return Dataset.from_dict({"input_ids": rows})
