"""Reads the files of a local checkpoint once, although vLLM calls the plugin several times for one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.headers import Tensors, read_headers
from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.files.weights import has_weights
from moe_coverage_plugin.manifest import Manifest, read_json


@dataclass(frozen=True)
class LocalFiles:
    """What the files of a checkpoint say, except the values of tensors.

    Attributes:
        config: ``config.json``.
        tensors: headers of all tensors.
    """

    config: Mapping[str, Any]
    tensors: Tensors


# of the last checkpoint, with the state of its directory
_last: list[tuple[object, LocalFiles]] = []


def read_local(model: str | Path) -> LocalFiles | None:
    """Read a checkpoint; one that was not changed since the last call is not read again.

    Args:
        model: directory or name of the checkpoint.

    Returns:
        ``None`` for a checkpoint that vLLM will download, and for one without weights.

    Raises:
        CoverageError: a file is missing, left over or damaged.
    """
    directory = Path(model)
    if not has_weights(directory) or not (directory / "config.json").is_file():
        return None
    state = directory.absolute(), _state(directory)
    if not _last or _last[0][0] != state:
        _last[:] = [(state, LocalFiles(read_json(directory / "config.json"), read_headers(directory)))]
    return _last[0][1]


def check_local(model: str, manifest: Manifest | None) -> None:
    """Check the files of a local checkpoint; one that vLLM will download, or without weights, is not checked.

    Raises:
        CoverageError: it is incomplete, damaged, or not that of its manifest.
    """
    if manifest is not None and (files := read_local(model)) is not None:
        check_checkpoint(Path(model), manifest, files.config, files.tensors)


def _state(directory: Path) -> list[tuple[str, int, int]]:
    found = ((file.name, file.stat()) for file in sorted(directory.iterdir()) if file.is_file())
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]
