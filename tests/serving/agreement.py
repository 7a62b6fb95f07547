"""How near two engines must come to each other, and what a checkpoint stores."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from tests.serving.engine import checkpoint_dtype, expected_logprobs

# float32: the order of sums differs, which moved log-probabilities of tiny models by 2e-6.
# bfloat16: rounding moves routers across ties, so that single positions of two right implementations differ by 0.2
# (transformers against itself in float32); the median of the differences was 0.008, their mean 0.008 to 0.019.
LARGEST_FLOAT32 = 1e-4
MEDIAN_BFLOAT16, MEAN_BFLOAT16 = 0.02, 0.05


def assert_agrees(path: Path, found: list[float]) -> None:
    """Compare log-probabilities of a prompt, or of its first tokens, with those of transformers."""
    expected = expected_logprobs(path)[1][: len(found)]
    difference = (torch.tensor(found) - torch.tensor(expected)).abs()
    if checkpoint_dtype(path) == "float32":
        assert difference.max() <= LARGEST_FLOAT32
    else:
        assert difference.median() <= MEDIAN_BFLOAT16
        assert difference.mean() <= MEAN_BFLOAT16


def stored_bytes_of_experts(path: Path) -> int:
    """Bytes of weights and scales of all experts in a checkpoint."""
    total = 0
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            names = [name for name in file.keys() if ".experts." in name and not name.endswith("_shape")]  # noqa: SIM118
            total += sum(file.get_tensor(name).nbytes for name in names)
    return total
