"""What the weights of a checkpoint directory weigh, and how its experts are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_coverage_plugin.expert_scheme import describe_numbers, quantized_groups
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
        storage: how the experts are stored, e.g. ``int4, symmetric, groups of 64``.
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
                    groups = quantized_groups(read_json(directory / "config.json").get("quantization_config"))
                    weights = [group["weights"] for group in groups]
                    bits = dict.fromkeys(f"{args.get('num_bits')} bits" for args in weights)
                    return " and ".join(bits), "; ".join(dict.fromkeys(map(describe_numbers, weights)))
                dtypes.add(shard.get_slice(name).get_dtype())
    bits = dict.fromkeys(f"{found[0]} bits" for dtype in sorted(dtypes) if (found := re.search(r"\d+", dtype)))
    return " and ".join(bits), f"{' and '.join(sorted(dtypes))}, not quantized" if dtypes else ""
