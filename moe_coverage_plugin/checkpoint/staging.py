"""Output directories that appear under their name when everything is in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compressed_tensors.distributed import is_source_process
from loguru import logger

from moe_coverage_plugin.files.atomic import check_place, in_use, remove_leftovers
from moe_coverage_plugin.manifest import CoverageError


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to ``target`` when the ``with`` block ends, and deleted if the block fails.

    Engines would take a directory with a config for a checkpoint and fill in missing weights at random. So that a
    process that is killed leaves a directory without ``config.json``, the block finds a link to an open file under
    that name. It must replace the link as its last step, as :func:`write_entry` does.
    """
    target = _resolved(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        # mkdtemp allows access to its user only, whatever the umask
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)
        with in_use(staging), tempfile.TemporaryFile() as unnamed:
            _link_config(staging, unnamed.fileno())
            yield staging
            if is_source_process():
                assert not (staging / "config.json").is_symlink(), "the with block must replace config.json"
                os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(target: Path, needed_bytes: int = 0) -> None:
    """Check that a checkpoint can be written to a directory, and remove what killed runs left beside it.

    Args:
        target: output directory.
        needed_bytes: free space that the checkpoint needs on its disk.

    Raises:
        CoverageError: the directory is not empty, cannot be created or replaced, or its disk has too little space.
    """
    target = _resolved(target)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise CoverageError(f"output {target} exists and is not empty: choose another directory, or empty this one")
    if target.is_dir() and (os.path.ismount(target) or target.samefile(".")):
        kind = "a mount point" if os.path.ismount(target) else "the current directory"
        raise CoverageError(
            f"output {target} is {kind}, which a complete checkpoint cannot replace: name a new directory in it, "
            f"{target / 'checkpoint'}"
        )
    for leftover in remove_leftovers(target):
        logger.info(f"Removed {leftover}, which a killed run left behind")
    free = shutil.disk_usage(check_place(target)).free
    if free < needed_bytes:
        raise CoverageError(
            f"output {target} needs about {needed_bytes / 2**30:.1f} GiB, its disk has {free / 2**30:.1f} GiB free: "
            "make room"
        )


def _link_config(directory: Path, handle: int) -> None:
    """Let what is written to ``config.json`` go to an open file, which ends with this process."""
    opened = Path(f"/proc/{os.getpid()}/fd/{handle}")
    # only Linux has /proc, and some file systems have no links
    if opened.exists():
        with suppress(OSError):
            (directory / "config.json").symlink_to(opened)


def _resolved(target: Path) -> Path:
    # a directory can be renamed over an empty directory, but not over a link to one
    return Path(os.path.realpath(target))
