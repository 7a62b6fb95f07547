"""What the weights of a checkpoint directory weigh, and how its experts are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.weights import open_weights, weight_files
from moe_coverage_plugin.manifest import REPORT_NAME, read_json

_EXPERT_WEIGHT = re.compile(r"\.experts\..*weight")


@dataclass(frozen=True)
class StoredWeights:
    """Sizes in bytes; empty or ``None`` if not known.

    Attributes:
        size: all weight files of the checkpoint.
        size_before: all weights before pruning.
        bits: of a weight of an expert, e.g. ``4 bits``.
        storage: how the experts are stored, e.g. ``int, groups of 64``.
    """

    size: int
    size_before: int | None = None
    bits: str = ""
    storage: str = ""


def read_stored_weights(directory: str | Path) -> StoredWeights:
    """Read a checkpoint's JSON files and the headers of its weight files; a directory that is being filled will do.

    Raises:
        CoverageError: no weight files, or damaged files.
    """
    directory = Path(directory)
    files = weight_files(directory)
    report = read_json(directory / REPORT_NAME) if (directory / REPORT_NAME).is_file() else {}
    before = report.get("weight_bytes_before")
    bits, storage = _experts(directory, files)
    size = sum(file.stat().st_size for file in files)
    return StoredWeights(size, before if type(before) is int and before > 0 else None, bits, storage)


def _experts(directory: Path, files: list[Path]) -> tuple[str, str]:
    """Bits and storage of the experts' weights."""
    dtypes: set[str] = set()
    for file in files:
        with open_weights(file, "np") as shard:
            for name in filter(_EXPERT_WEIGHT.search, shard.keys()):
                # config.json may still describe the quantization of a model that was decompressed since
                if name.endswith("weight_scale"):
                    schemes = list(_schemes(read_json(directory / "config.json")))
                    bits = dict.fromkeys(f"{scheme.get('num_bits')} bits" for scheme in schemes)
                    return " and ".join(bits), "; ".join(dict.fromkeys(map(_storage, schemes)))
                dtypes.add(shard.get_slice(name).get_dtype())
    bits = dict.fromkeys(f"{found[0]} bits" for dtype in sorted(dtypes) if (found := re.search(r"\d+", dtype)))
    return " and ".join(bits), f"{' and '.join(sorted(dtypes))}, not quantized" if dtypes else ""


def _schemes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    quantization = config.get("quantization_config")
    groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            yield group["weights"]


def _storage(scheme: Mapping[str, Any]) -> str:
    strategy, group_size = scheme.get("strategy"), scheme.get("group_size")
    return f"{scheme.get('type')}, " + (
        f"groups of {group_size}" if strategy == "group" else f"one scale per {strategy}"
    )
