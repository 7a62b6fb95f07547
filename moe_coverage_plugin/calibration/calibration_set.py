"""Checks of a calibration set, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.manifest import CoverageError


def _fingerprint(input_ids: Tensor) -> bytes:
    return hashlib.sha256(input_ids.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()).digest()


def data_hash(batches: Iterable[Mapping[str, Any]]) -> str:
    """Hash of a calibration set's token ids, independent of the order of samples and of the number of ranks.

    Raises:
        CoverageError: two ranks have the same samples, which would count twice.
    """
    samples = sorted(_fingerprint(ids_S) for batch in batches for ids_S in batch["input_ids"])
    ranks = gather_over_ranks(samples)
    # patch: same-samples
    if len({tuple(samples) for samples in ranks}) < len(ranks):
        # the toolkit gives all ranks the same samples if they pass the same data set
        raise CoverageError(
            f"some of {len(ranks)} ranks calibrate on the same {len(samples)} samples: give each rank a part of its "
            "own, for instance dataset.shard(world_size, rank)"
        )
    return hashlib.sha256(b"".join(sorted(chain.from_iterable(ranks)))).hexdigest()


def batches_hash(batches: Iterable[Mapping[str, Any]]) -> str:
    """Hash of everything in the batches of this rank, in their order."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, value in sorted(batch.items()):
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype} {list(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


def check_batches(batches: Iterable[Mapping[str, Any]] | None) -> None:
    """Check that there is a calibration set, before anything runs.

    Raises:
        CoverageError: there is no batch, or the first batch has no token ids.
    """
    first = next(iter(batches), None) if batches is not None else None
    if first is None:
        raise CoverageError(
            "the calibration set is empty: scores need data, pass dataset=... with at least one sample"
        )
    if first.get("input_ids") is None or first["input_ids"].numel() == 0:
        raise CoverageError("the first calibration batch has no input_ids: pass a dataset of text or of token ids")
