"""Writes files that appear under their name complete or not at all. Standard library only."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_coverage_plugin.manifest import CoverageError


def write_atomically(path: Path, data: bytes | Callable[[Path], object]) -> None:
    """Write a hidden file beside ``path``, then rename it to ``path``; directories are created as needed.

    Args:
        path: of the file.
        data: its content, or a function that writes a file under the name that it is given.

    Raises:
        CoverageError: the file cannot be written; a file that was there before is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        with in_use(lambda: _touched(partial)):
            data(partial) if callable(data) else partial.write_bytes(data)
            os.replace(partial, path)
    except OSError as error:
        raise CoverageError(f"{path} cannot be written ({error.strerror}): choose another place") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def check_place(path: Path) -> Path:
    """Check that a path can be created.

    Returns:
        The nearest existing directory above the path.

    Raises:
        CoverageError: nothing can be created in that directory.
    """
    place = next(each for each in path.absolute().parents if os.path.lexists(each))
    try:
        # permission bits do not show read-only disks and quotas; this file never has a name
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise CoverageError(
            f"{path} cannot be created: {place} is not writable ({error.strerror}), choose another place"
        ) from error
    return place


@contextmanager
def in_use(create: Callable[[], Path]) -> Iterator[Path]:
    """Create a partial file or directory that :func:`remove_leftovers` of other processes leaves alone.

    The mark is a lock, which ends with the process, however that ends. Another process can take what was just created
    for a leftover before it is locked: then it is created again.

    Args:
        create: creates and returns it; under a name that already exists it may return what is there.
    """
    while True:
        partial = create()
        handle = lock(partial)
        if handle is not None:
            break
    try:
        yield partial
    finally:
        os.close(handle)


def lock(path: Path) -> int | None:
    """Return an open handle that locks a file or directory, or None if another process has locked or removed it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        # on file systems without locks remove_leftovers gets no lock either, and so removes nothing
        return handle
    if os.path.lexists(path) and os.path.samestat(os.stat(path), os.fstat(handle)):
        return handle
    os.close(handle)
    return None


def remove_leftovers(path: Path) -> list[Path]:
    """Remove and return partial files and directories beside ``path`` that no running process writes."""
    named = re.compile(rf"\.{re.escape(path.name)}\.\w+\.partial")
    removed: list[Path] = []
    with suppress(OSError):
        removed = [each for each in path.parent.iterdir() if named.fullmatch(each.name) and _remove_unused(each)]
    return removed


def _remove_unused(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _touched(path: Path) -> Path:
    path.touch()
    return path
