"""Finds the padding of calibration batches inside the toolkit's pipelines, which pass tokens without a mask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.manifest import CoverageError


class TokenMask:
    """Finds the padding of the current batch by its token ids.

    A pipeline may run the layers one after another over all batches, from cached activations. So the mask is looked up
    when the ids enter the model, and stored under the number of the batch. Samples are looked up one by one, because a
    shuffling loader forms other batches every time it is read.
    """

    def __init__(self, batches: Iterable[Mapping[str, Any]]):
        self._by_sample: dict[bytes, Tensor] = {}
        self._by_batch: dict[int, Tensor] = {}
        any_padding = False
        for batch in batches:
            ids_BS, mask_BS = batch["input_ids"], batch.get("attention_mask")
            mask_BS = torch.ones_like(ids_BS) if mask_BS is None else mask_BS
            any_padding = any_padding or not bool(mask_BS.all())
            for ids_S, mask_S in zip(ids_BS, mask_BS.bool().cpu(), strict=True):
                self._by_sample[_fingerprint(ids_S)] = mask_S
        if not any_padding:
            self._by_sample.clear()

    def on_embedding(self, batch_index: int, module: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the input embedding.

        Raises:
            CoverageError: a sample was not among the batches given before, so its padding is unknown.
        """
        if not self._by_sample:
            return
        masks = [self._by_sample.get(_fingerprint(ids_S)) for ids_S in args[0]]
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            raise CoverageError(
                f"{len(masks) - len(known)} samples of calibration batch {batch_index} differ from those read before, "
                "so their padding is unknown: pad all samples to one length, or do not shuffle"
            )
        self._by_batch[batch_index] = torch.cat(known)

    def of(self, batch_index: int, tokens: int) -> Tensor | None:
        """Bool mask ``[T]`` of the tokens of a batch that are not padding; ``None`` if none is padding."""
        mask = self._by_batch.get(batch_index)
        assert mask is None or mask.numel() == tokens, (
            f"batch {batch_index} has {tokens} tokens, its mask {mask.numel()}"
        )
        return mask


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
