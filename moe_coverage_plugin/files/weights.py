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
# files that engines load weights from by default; pickles are among them
LOADED = (f"*{SUFFIX}", "*.bin", "*.pt", INDEX_NAME)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that the index of a checkpoint lists, or without an index all safetensors files, sorted.

    All files are in the directory itself, or they are links into the blobs of the Hugging Face cache.

    Raises:
        CoverageError: there are no weights; the index cannot be read or lists anything but safetensors files of the
            directory; a file is absent, or is a link to another place.
    """
    has_index = os.path.lexists(directory / INDEX_NAME)
    names = _indexed_names(directory) if has_index else _files_there(directory)
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
    if has_index and (stray := sorted(set(_files_there(directory)) - set(names))):
        raise CoverageError(
            f"{directory} holds {stray[0]}, which {INDEX_NAME} does not list: it is of another checkpoint or "
            "of another kind, move it out of the directory, or copy the checkpoint again into a new one"
        )
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


def has_weights(directory: Path) -> bool:
    """Return whether a path is a local directory with a file that an engine may load."""
    return any(any(directory.glob(pattern)) for pattern in LOADED)


def _files_there(directory: Path) -> list[str]:
    # file managers put hidden files of the same suffix beside them, which no engine reads
    return sorted(file.name for file in directory.glob(f"*{SUFFIX}") if not file.name.startswith("."))


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
    home = Path(os.path.realpath(directory))
    if place.is_relative_to(home):
        return
    # in the Hugging Face cache, snapshots/REVISION/FILE is a link to blobs/HASH; the directory itself may be a link to
    # such a revision, or in a cache that is a link
    snapshots = [parent for path in (directory.absolute(), home) for parent in path.parents]
    repositories = [parent.parent for parent in snapshots if parent.name == "snapshots"]
    if any(place.is_relative_to(os.path.realpath(repository / "blobs")) for repository in repositories):
        return
    # a download into a directory can have links into the cache
    if place.parent.name == "blobs" and any(
        os.path.realpath(file) == str(place) for file in place.parent.parent.glob(f"snapshots/*/{name}")
    ):
        return
    raise CoverageError(
        f"{name} is a link to {place}, outside of {directory}: copy the file itself into the directory"
    )
