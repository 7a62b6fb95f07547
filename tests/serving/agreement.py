"""How closely an engine must agree with transformers, and how many bytes a checkpoint stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.serving.engine import checkpoint_dtype, expected_logprobs

# sums are in another order, which changed log-probabilities of tiny models by 2e-6
LARGEST_FLOAT32 = 1e-4
# Rounding changes which experts routers select at ties, so single positions of two correct implementations differ by
# more than 1 in bfloat16. So both are compared with float32, and transformers also with other roundings of its layers.
TIMES_ROUNDING = 2


def assert_agrees(path: Path, found: list[float], dtype: str | None = None) -> None:
    """Assert that log-probabilities agree by :func:`agreement`."""
    result = agreement(path, found, dtype)
    assert result["agrees"], result


def agreement(path: Path, found: list[float], dtype: str | None = None) -> dict[str, Any]:
    """Compare log-probabilities of a prompt, or of its first tokens, with those of transformers.

    In bfloat16 they may be up to twice as far from those of float32 as transformers is with one rounding or another.

    Args:
        path: the checkpoint.
        found: log-probabilities.
        dtype: in which they were computed; by default the checkpoint's.

    Returns:
        ``agrees``; their distance from float32, and in bfloat16 also the largest distance of transformers.
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
        path: the checkpoint.
        dtype: to which floating-point tensors, except those of 8 bits, are cast when they are loaded.
    """
    total = 0
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            names = [name for name in file.keys() if ".experts." in name and not name.endswith("_shape")]  # noqa: SIM118
            for tensor in map(file.get_tensor, names):
                wide = dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1
                total += tensor.numel() * (getattr(torch, dtype) if wide else tensor.dtype).itemsize
    return total
