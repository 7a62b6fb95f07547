"""How near two engines must come to each other, and what a checkpoint stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.serving.engine import checkpoint_dtype, expected_logprobs

# the order of sums differs, which moved log-probabilities of tiny models by 2e-6
LARGEST_FLOAT32 = 1e-4
# Rounding moves routers across ties, so that single positions of two right implementations differ by more than 1 in
# bfloat16. So both are compared with float32, and transformers also where its layers round otherwise.
TIMES_ROUNDING = 2


def assert_agrees(path: Path, found: list[float], dtype: str | None = None) -> None:
    """Make sure that ``agreement`` says so."""
    result = agreement(path, found, dtype)
    assert result["agrees"], result


def agreement(path: Path, found: list[float], dtype: str | None = None) -> dict[str, Any]:
    """Compare log-probabilities of a prompt, or of its first tokens, with those of transformers.

    In bfloat16 they may be up to twice as far from those of float32 as transformers is with one rounding or another.

    Args:
        dtype: what they were computed in; the checkpoint's where not given.

    Returns:
        ``agrees``; how far they are from float32, and in bfloat16 also how far transformers is at most.
    """
    exact = expected_logprobs(path, "float32")[1]
    error = _distance(found, exact)
    result = {"error": _figures(error)}
    if (dtype or checkpoint_dtype(path)) == "float32":
        return result | {"agrees": bool(error.max() <= LARGEST_FLOAT32)}
    rounded = [expected_logprobs(path, "bfloat16")[1], *expected_logprobs(path, "bfloat16_shaken")[1]]
    rounding = [_figures(_distance(each[: len(found)], exact)) for each in rounded]
    most = {name: max(each[name] for each in rounding) for name in ("median", "mean")}
    near = all(result["error"][name] <= TIMES_ROUNDING * most[name] for name in most)
    return result | {"of_transformers": most, "agrees": near}


def _distance(found: list[float], expected: list[float]) -> torch.Tensor:
    return (torch.tensor(found) - torch.tensor(expected[: len(found)])).abs()


def _figures(distance: torch.Tensor) -> dict[str, float]:
    return {"median": distance.median().item(), "mean": distance.mean().item(), "max": distance.max().item()}


def stored_bytes_of_experts(path: Path, dtype: str | None = None) -> int:
    """Bytes of weights and scales of all experts in a checkpoint.

    Args:
        dtype: what floating-point tensors, save those of 8 bits, are narrowed to where they are loaded.
    """
    total = 0
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            names = [name for name in file.keys() if ".experts." in name and not name.endswith("_shape")]  # noqa: SIM118
            for tensor in map(file.get_tensor, names):
                wide = dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1
                total += tensor.numel() * (getattr(torch, dtype) if wide else tensor.dtype).itemsize
    return total
