"""Finds the tensors beside a model that checkpoints of it leave out: layers that predict several tokens (MTP)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.origin import HUB_ID
from moe_coverage_plugin.files.mtp import is_mtp_name, mtp_layers
from moe_coverage_plugin.files.weights import SUFFIX, open_weights
from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, read_json

SINGLE_NAME = f"model{SUFFIX}"
LEFT_OUT_KEY = "mtp_left_out"


@dataclass(frozen=True)
class LeftOut:
    """Layers that predict several tokens, which transformers did not load.

    Attributes:
        layers: number that the model's config counts.
        tensors: number of their tensors in the files that the model was loaded from; 0 if there are none or the files
            are not there anymore.
        size: bytes of these tensors.
    """

    layers: int
    tensors: int
    size: int

    def __bool__(self) -> bool:
        return bool(self.layers or self.tensors)

    def __str__(self) -> str:
        known = f"{self.tensors} tensors, {self.size / 2**20:.1f} MiB" if self.tensors else "its files have none"
        return f"layers that predict several tokens (MTP; {self.layers} in the config; {known})"


def find_left_out(model: PreTrainedModel) -> LeftOut:
    """Look for MTP layers in a model's config, and in the files that it was loaded from. The hub is not contacted."""
    config = model.config.to_dict()
    layers = mtp_layers(config)
    tensors = size = 0
    for nbytes in _mtp_tensors(model, config):
        tensors, size = tensors + 1, size + nbytes
        layers = max(layers, 1)
    return LeftOut(layers, tensors, size)


def source_file(model: PreTrainedModel, name: str) -> Path | None:
    """Return a file beside the weights that a model was loaded from; ``None`` if it is not on this machine."""
    source = str(model.config._name_or_path or model.name_or_path or "")
    path = Path(source) / name
    if source and path.is_file():
        return path
    if not HUB_ID.fullmatch(source):
        return None
    cached = try_to_load_from_cache(source, name, revision=getattr(model.config, "_commit_hash", None))
    return Path(cached) if isinstance(cached, str) else None


def _mtp_tensors(model: PreTrainedModel, config: dict[str, Any]) -> Iterator[int]:
    """Yield the bytes of each MTP tensor; of files that cannot be read, nothing."""
    try:
        if (index := source_file(model, INDEX_NAME)) is not None:
            weight_map = read_json(index).get("weight_map") or {}
            names = {weight_map[name] for name in weight_map if is_mtp_name(name, config)}
        else:
            single = source_file(model, SINGLE_NAME)
            index, names = single, {SINGLE_NAME} if single is not None else set()
        for name in sorted(names):
            assert index is not None
            with open_weights(index.with_name(os.path.basename(name)), "np") as shard:
                for tensor in shard.keys():  # noqa: SIM118 - an open file is not a mapping
                    if is_mtp_name(tensor, config):
                        yield _nbytes(shard.get_slice(tensor))
    except (CoverageError, AttributeError, TypeError):
        return


def _nbytes(stored: Any) -> int:
    bits = int("".join(filter(str.isdigit, stored.get_dtype().partition("_")[0])) or 8)
    elements = 1
    for size in stored.get_shape():
        elements *= size
    return elements * bits // 8
