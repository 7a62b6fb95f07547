"""Finds and opens the weight files of a checkpoint that may come from a stranger, or be incomplete."""

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
    """Files that the index of a checkpoint lists, or else every safetensors file in it, sorted.

    All of them lie in the directory, or where the Hugging Face cache keeps what the directory links to.

    Raises:
        CoverageError: no weights, an index that cannot be read or names anything but a safetensors file beside it, a
            file that is absent, or one that lies elsewhere.
    """
    has_index = os.path.lexists(directory / INDEX_NAME)
    names = _indexed_names(directory) if has_index else sorted(file.name for file in directory.glob(f"*{SUFFIX}"))
    if not names:
        raise CoverageError(
            f"{directory} holds no weights, neither {INDEX_NAME} nor any *{SUFFIX}: the checkpoint is incomplete or "
            "of another kind, copy it again"
        )
    for name in names:
        # also false for links that lead nowhere
        if not os.path.isfile(directory / name):
            raise CoverageError(
                f"{directory} lacks {name}, which is one of {len(names)} files of the checkpoint: copy the checkpoint "
                "again"
            )
        _check_place(directory, name)
    return [directory / name for name in names]


@contextmanager
def open_weights(file: Path, framework: str = "pt") -> Iterator[Any]:
    """A safetensors file, opened; whatever is wrong with it is told in words.

    Raises:
        CoverageError: it is absent, cut off or damaged.
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
        # a path would lead out of the directory, and a file of another kind may be a pickle
        if not isinstance(name, str) or "/" in name or not name.isprintable() or not name.endswith(SUFFIX):
            raise CoverageError(
                f"{INDEX_NAME} lists {short(name)}, where only names of {SUFFIX[1:]} files beside it may stand: copy "
                "the checkpoint again, from a source that you trust"
            )
    return sorted(set(weight_map.values()))


def _check_place(directory: Path, name: str) -> None:
    place = Path(os.path.realpath(directory / name))
    allowed = [Path(os.path.realpath(directory))]
    # the layout of the Hugging Face cache: snapshots/REVISION/FILE links to blobs/HASH
    snapshots = [parent.parent for parent in directory.absolute().parents if parent.name == "snapshots"]
    allowed += [Path(os.path.realpath(repository / "blobs")) for repository in snapshots]
    if not any(place.is_relative_to(parent) for parent in allowed):
        raise CoverageError(
            f"{name} is a link to {place}, outside of {directory}: copy the file itself into the directory"
        )
