"""Finds and opens the weight files of a checkpoint that may be incomplete or from an untrusted source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

from safetensors import SafetensorError, safe_open

from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, read_json

SUFFIX = ".safetensors"


def weight_files(directory: Path) -> list[Path]:
    """Return the files that the index of a checkpoint lists, or without an index all safetensors files, sorted.

    All files are in the directory itself, or they are links into the blobs of the Hugging Face cache.

    Raises:
        CoverageError: there are no weights; the index cannot be read or lists anything but safetensors files of the
            directory; a file is absent, or is a link to another place.
    """
    has_index = os.path.lexists(directory / INDEX_NAME)
    names = _indexed_names(directory) if has_index else sorted(file.name for file in directory.glob(f"*{SUFFIX}"))
    if not names:
        raise CoverageError(
            f"{directory} holds no weights, neither {INDEX_NAME} nor any *{SUFFIX}: the checkpoint is incomplete or "
            "of another kind, copy it again"
        )
    for name in names:
        # also false for broken links
        if not os.path.isfile(directory / name):
            raise CoverageError(
                f"{directory} lacks {name}, which is one of {len(names)} files of the checkpoint: copy the checkpoint "
                "again"
            )
        _check_place(directory, name)
    return [directory / name for name in names]


@contextmanager
def open_weights(file: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file.

    Args:
        file: the file.
        framework: the kind of tensors that it returns, ``pt`` for torch and ``np`` for NumPy.

    Raises:
        CoverageError: the file is absent, cut off or damaged.
    """
    try:
        with safe_open(file, framework) as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CoverageError(
            f"{file.name} cannot be read ({error}): it is absent or was cut off, copy the checkpoint again"
        ) from error


def _indexed_names(directory: Path) -> list[str]:
    index = read_json(directory / INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CoverageError(f"{INDEX_NAME} cannot be read (it has no weight_map): copy the checkpoint again")
    for name in weight_map.values():
        # a path can lead out of the directory, and a file of another kind can be a pickle
        if not isinstance(name, str) or "/" in name or not name.isprintable() or not name.endswith(SUFFIX):
            raise CoverageError(
                f"{INDEX_NAME} lists {short(name)}, but only {SUFFIX[1:]} files in its own directory are allowed: "
                "copy the checkpoint again, from a source that you trust"
            )
    return sorted(set(weight_map.values()))


def _check_place(directory: Path, name: str) -> None:
    place = Path(os.path.realpath(directory / name))
    allowed = [Path(os.path.realpath(directory))]
    # in the Hugging Face cache, snapshots/REVISION/FILE is a link to blobs/HASH
    snapshots = [parent.parent for parent in directory.absolute().parents if parent.name == "snapshots"]
    allowed += [Path(os.path.realpath(repository / "blobs")) for repository in snapshots]
    if not any(place.is_relative_to(parent) for parent in allowed):
        raise CoverageError(
            f"{name} is a link to {place}, outside of {directory}: copy the file itself into the directory"
        )
