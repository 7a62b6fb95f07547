"""Which tokens of a calibration batch are real. Pipelines hand experts a flat run of tokens, without the mask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.manifest import CoverageError


class TokenMask:
    """Finds the padding of the batch in flight by its token ids.

    A pipeline may run the layers one after another over all batches, in an order of its own and from cached
    activations, so the mask is looked up once, where the ids enter the model, and remembered under the batch's number.
    """

    def __init__(self, batches: Iterable[Mapping[str, Any]]):
        self._by_ids = {
            _fingerprint(batch["input_ids"]): batch["attention_mask"].bool().flatten().cpu()
            for batch in batches
            if batch.get("attention_mask") is not None and not bool(batch["attention_mask"].all())
        }
        self._by_batch: dict[int, Tensor] = {}

    def on_embedding(self, batch_index: int, module: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the input embedding."""
        if self._by_ids and (mask := self._by_ids.get(_fingerprint(args[0]))) is not None:
            self._by_batch[batch_index] = mask

    def of(self, batch_index: int, tokens: int) -> Tensor | None:
        """Bool mask ``[tokens]`` of the real tokens of a batch; ``None``: all of them."""
        mask = self._by_batch.get(batch_index)
        assert mask is None or mask.numel() == tokens, (
            f"batch {batch_index} has {tokens} tokens, its mask {mask.numel()}"
        )
        return mask


def _fingerprint(input_ids: Tensor) -> bytes:
    return hashlib.sha256(input_ids.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()).digest()


def data_hash(batches: Iterable[Mapping[str, Any]]) -> str:
    """Hash of a calibration set's token ids, whatever the order of its batches."""
    return hashlib.sha256(b"".join(sorted(_fingerprint(batch["input_ids"]) for batch in batches))).hexdigest()


def check_batches(batches: Iterable[Mapping[str, Any]] | None) -> None:
    """Refuse a calibration set that is absent or empty, before anything runs.

    Raises:
        CoverageError: there is no batch, or a batch holds no token ids.
    """
    first = next(iter(batches), None) if batches is not None else None
    if first is None:
        raise CoverageError(
            "the calibration set is empty: scores need data, pass dataset=... with at least one sample"
        )
    if first.get("input_ids") is None or first["input_ids"].numel() == 0:
        raise CoverageError("the first calibration batch has no input_ids: pass a dataset of text or of token ids")
