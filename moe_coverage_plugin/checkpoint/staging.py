"""Output directories that have a complete checkpoint or none, whatever else is in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loguru import logger

from moe_coverage_plugin.checkpoint.contents import Contents, read_contents, same_files
from moe_coverage_plugin.checkpoint.merging import follow_umask, merge, open_to_umask
from moe_coverage_plugin.files.atomic import check_place, in_use, remove_leftovers
from moe_coverage_plugin.manifest import CoverageError, Manifest


@contextmanager
def staged(target: Path, writes: bool = True) -> Iterator[Path]:
    """Yield a directory that takes the place of ``target`` when the ``with`` block ends; deleted if the block fails.

    Files in ``target`` that are not of a checkpoint are kept, and nothing changes if ``target`` has this checkpoint
    already.

    Engines would take a directory with a config for a checkpoint and fill in missing weights at random. So that a
    process that is killed leaves a directory without ``config.json``, the block finds a link to an open file under
    that name. It must replace the link as its last step, as :func:`write_entry` does.

    Args:
        target: output directory.
        writes: whether this process puts the checkpoint there; other ranks only take part in the saving.
    """
    target = resolved(target)
    target.parent.mkdir(parents=True, exist_ok=True)

    def create() -> Path:
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))

    with in_use(create) as staging, tempfile.TemporaryFile() as unnamed:
        try:
            open_to_umask(staging)
            _link_config(staging, unnamed.fileno())
            yield staging
            if writes:
                assert not (staging / "config.json").is_symlink(), "the with block must replace config.json"
                follow_umask(staging)
                _place(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_output(
    target: Path, needed_bytes: int = 0, manifest: Manifest | None = None, quantized: bool = False
) -> None:
    """Check that a checkpoint can be written to a directory, and remove what killed runs left beside it.

    Args:
        target: output directory; may have files that are not of a checkpoint, such as those of a tokenizer.
        needed_bytes: free space that the checkpoint needs on its disk.
        manifest: of the model that is saved, which replaces a checkpoint of the same widths; not given before a run,
            which would end with other weights.
        quantized: whether the weights that are saved are quantized.

    Raises:
        CoverageError: the directory has another checkpoint, cannot be created or replaced, or its disk has too little
            space.
    """
    target = resolved(target)
    if os.path.lexists(target):
        if not target.is_dir():
            raise CoverageError(f"output {target} exists and is not a directory: choose another one")
        _check_contents(target, read_contents(target), manifest, quantized)
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


def resolved(target: Path) -> Path:
    """Follow links: a directory can be renamed over an empty directory, but not over a link to one."""
    return Path(os.path.realpath(target))


def _check_contents(target: Path, contents: Contents, manifest: Manifest | None, quantized: bool) -> None:
    found = contents.manifest
    if found is None:
        if contents.weights or contents.config:
            names = ", ".join(contents.names[:3]) + (", ..." if len(contents.names) > 3 else "")
            raise CoverageError(
                f"output {target} has weights or a config that are not of this model ({names}): choose another "
                "directory, or move them away"
            )
        return
    state = f"a complete {found.layout} checkpoint" if contents.complete else "an incomplete checkpoint"
    if manifest is None:
        raise CoverageError(
            f"output {target} has {state} already, made from {found.provenance.get('model') or 'an unnamed model'}: "
            "choose another directory, or delete it"
        )
    described = [(each.layout, each.intermediate_size, each.block_size, each.widths) for each in (found, manifest)]
    if described[0] != described[1] or contents.quantized != quantized:
        kinds = ["quantized" if each else "16-bit" for each in (contents.quantized, quantized)]
        difference = (
            f"{kinds[0]} weights and this model {kinds[1]} ones" if kinds[0] != kinds[1] else "experts of other widths"
        )
        raise CoverageError(
            f"output {target} has {state} already, with {difference}: choose another directory, or delete it"
        )


def _place(staging: Path, target: Path) -> None:
    """Put a complete checkpoint in its place."""
    contents = read_contents(target) if target.is_dir() else None
    if contents is None or not contents.entries:
        if contents is not None:
            shutil.copymode(target, staging)
        os.replace(staging, target)
    elif contents.manifest is not None and same_files(staging, target):
        logger.info(f"{target} has this checkpoint already: nothing was written")
        return
    else:
        merge(staging, target, contents)
    stored = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    logger.info(f"Saved {target}: {stored / 2**20:.1f} MiB of weights")


def _link_config(directory: Path, handle: int) -> None:
    """Let what is written to ``config.json`` go to an open file, which ends with this process."""
    opened = Path(f"/proc/{os.getpid()}/fd/{handle}")
    # only Linux has /proc, and some file systems have no links
    if opened.exists():
        with suppress(OSError):
            (directory / "config.json").symlink_to(opened)
