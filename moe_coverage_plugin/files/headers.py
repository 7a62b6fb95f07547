"""Reads the headers of a checkpoint's weight files."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

from moe_coverage_plugin.files.weights import open_weights, weight_files
from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, read_json

# of the length of a header, at the start of a file
LENGTH_BYTES = 8
# in the names of an engine's own parameters
OF_ENGINES = ".routed_experts."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weight file.

    Attributes:
        dtype: in the spelling of safetensors, such as ``BF16``.
        shape: its shape.
        file: the file that holds it.
        offset: of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bits(self) -> int:
        """Bits of an element."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) if bits is not None else 8

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.elements * self.item_bits // 8


Tensors = dict[str, StoredTensor]


def read_headers(directory: Path) -> Tensors:
    """Return all tensors of a checkpoint by name.

    Raises:
        CoverageError: a file cannot be read, or is not of the checkpoint; a tensor is stored twice, or is in another
            file than the index says; or an engine wrote the files for itself.
    """
    found: Tensors = {}
    for file in weight_files(directory):
        for name, tensor in _read_header(file).items():
            if OF_ENGINES in name:
                raise CoverageError(
                    f"{file} holds {name}, which an engine has rearranged for its ranks (sharded_state): serve "
                    "the checkpoint that the engine loaded"
                )
            if name in found:
                raise CoverageError(
                    f"{file.name} holds {name} a second time, after {found[name].file.name}: the files are of two "
                    "checkpoints, copy the checkpoint again into a new directory"
                )
            found[name] = tensor
    if os.path.lexists(directory / INDEX_NAME):
        _check_index(directory, found)
    return found


def _read_header(file: Path) -> Tensors:
    # the library checks that the tensors fill the file and do not overlap
    with open_weights(file, "np"), file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), file, start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _check_index(directory: Path, found: Tensors) -> None:
    weight_map = read_json(directory / INDEX_NAME)["weight_map"]
    for name in weight_map.keys() | found.keys():
        listed, stored = weight_map.get(name), found.get(name)
        if stored is None:
            raise CoverageError(
                f"{INDEX_NAME} lists {short(name)} in {listed}, which does not hold it: index and files are of "
                "different checkpoints, copy the checkpoint again"
            )
        if listed != stored.file.name:
            place = "does not list it" if listed is None else f"says {listed}"
            raise CoverageError(
                f"{stored.file.name} holds {name}, but {INDEX_NAME} {place}: index and files are of different "
                "checkpoints, copy the checkpoint again"
            )
