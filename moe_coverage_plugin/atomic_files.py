"""Files that appear under their name complete or not at all. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moe_coverage_plugin.manifest import CoverageError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a hidden neighbour of ``path``, whose directory is made where it is missing, and rename it.

    Raises:
        CoverageError: the file cannot be written; what was there before is left as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        raise CoverageError(f"{path} cannot be written ({error.strerror}): choose another place") from error
    finally:
        with suppress(OSError):
            partial.unlink()
