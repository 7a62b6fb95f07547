"""Merges a checkpoint into a directory that has other files, or replaces an older checkpoint in it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from loguru import logger

from moe_coverage_plugin.checkpoint.contents import CONFIG_NAME, Contents
from moe_coverage_plugin.checkpoint.origin import CARD_NAME
from moe_coverage_plugin.files.tokenizer import FILES as TOKENIZER_FILES
from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import CoverageError

# of the system call that exchanges two directories
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def merge(staging: Path, target: Path, contents: Contents) -> None:
    """Put a checkpoint into a directory with other files, so that readers find all of it or nothing.

    ``staging`` gets links to the other files and is exchanged with ``target`` in one step; what ``staging`` then has
    is to be deleted. If the system cannot do that, files are moved into ``target`` one by one, ``config.json`` last.

    A tokenizer and a model card that are in ``target`` are the user's and are kept. All other files of the checkpoint
    replace files of the same name.

    Args:
        staging: complete checkpoint, beside ``target``.
        target: directory.
        contents: what ``target`` has. If that is a checkpoint, its weights are replaced.
    """
    _keep_files_of_user(staging, target)
    replaced = set(contents.weights)
    # this process would stay in a directory that is deleted
    if not _is_inside(target):
        seen: set[Path] = set()
        if _link(target, staging, Path(), replaced, seen) and _exchange(staging, target):
            _move_late_files(staging, target, seen)
            return
    _move_in(staging, target, replaced)


def open_to_umask(directory: Path) -> None:
    """Give a directory made by ``mkdtemp`` the permissions of an ordinary one."""
    directory.chmod(_mode_of_new_directory(directory))


def follow_umask(directory: Path) -> None:
    """Give everything in a directory the permissions that the umask grants.

    safetensors writes files that only their owner can read, and copies of files have the permissions of these.
    """
    mode = _mode_of_new_directory(directory)
    for path in directory.rglob("*"):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


def _mode_of_new_directory(beside: Path) -> int:
    # reading the umask would change it for all threads for a moment
    probe = beside / ".mode"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o7777
    probe.rmdir()
    return mode


def _is_inside(directory: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(directory)
    except OSError:
        return False


def _keep_files_of_user(staging: Path, target: Path) -> None:
    kept = {name for name in (CARD_NAME, *TOKENIZER_FILES) if (target / name).exists() and (staging / name).exists()}
    replaced = set(kept)
    if has_tokenizer(target):
        # two tokenizers must not mix
        replaced |= {name for name in TOKENIZER_FILES if (staging / name).exists()}
    for name in replaced:
        (staging / name).unlink()
    if kept:
        logger.info(f"Kept what was in {target} before: {', '.join(sorted(kept))}")


def _link(source: Path, destination: Path, folder: Path, left_out: set[str], seen: set[Path]) -> bool:
    """Link all files of a directory into another one; files of the same name there stay.

    Args:
        source: directory.
        destination: directory on the same disk.
        folder: the part of ``source`` to link.
        left_out: names in ``source`` itself that are left out.
        seen: gets the paths of everything that was considered, relative to ``source``.

    Returns:
        Whether that was possible.
    """
    if folder == Path():
        shutil.copymode(source, destination)
    for entry in sorted((source / folder).iterdir()):
        path = folder / entry.name
        seen.add(path)
        new = destination / path
        if path.parent == Path() and entry.name in left_out:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if os.path.ismount(entry) or (os.path.lexists(new) and not new.is_dir()):
                return False
            if not new.exists():
                new.mkdir()
                shutil.copystat(entry, new)
            if not _link(source, destination, path, left_out, seen):
                return False
        elif not os.path.lexists(new):
            try:
                os.link(entry, new, follow_symlinks=False)
            except OSError:
                # another mount, or a file system without links
                return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _move_late_files(old: Path, new: Path, seen: set[Path]) -> None:
    """Move files that another program wrote while links were made."""
    for path in sorted(old.rglob("*")):
        relative = path.relative_to(old)
        if relative not in seen and not path.is_dir() and not os.path.lexists(new / relative):
            (new / relative).parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, new / relative)


def _move_in(staging: Path, target: Path, replaced: set[str]) -> None:
    """Move all files of a checkpoint into a directory, ``config.json`` last."""
    files = [path for path in staging.rglob("*") if not path.is_dir() and path != staging / CONFIG_NAME]
    for path in files:
        if (target / path.relative_to(staging)).is_dir():
            raise CoverageError(
                f"{target} has a directory named {path.relative_to(staging)}, which is the name of a file of the "
                "checkpoint: move it away, or choose another directory"
            )
    (target / CONFIG_NAME).unlink(missing_ok=True)
    for name in replaced:
        (target / name).unlink(missing_ok=True)
    for path in [*files, staging / CONFIG_NAME]:
        new = target / path.relative_to(staging)
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or not new.exists() or not path.samefile(new):
            os.replace(path, new)
