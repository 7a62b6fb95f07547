"""What a run keeps beside its output while it works, so that the same run goes on from there if it is killed.

A hidden directory with a description of the run, and files of tensors that appear complete or not at all. Whatever
differs from the description of the run that opens the directory, or is damaged, is removed and never used.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_coverage_plugin.files.atomic import lock, write_atomically
from moe_coverage_plugin.manifest import CoverageError

CHECKSUM = "crc32"
# bytes that places of tensors in one piece of memory are multiples of
ALIGNMENT = 64


def progress_directory(output: str | Path) -> Path:
    """Return the directory in which a run with this output keeps its progress."""
    target = Path(os.path.realpath(output))
    return target.with_name(f".{target.name}.progress")


def check_unused(directory: Path) -> None:
    """Check that no run uses a directory of progress.

    Raises:
        CoverageError: one does.
    """
    if directory.is_dir() and (handle := _locked(directory)) is not None:
        os.close(handle)


def stored_bytes(directory: Path) -> int:
    """Return the bytes of all files in a directory of progress, 0 if there is none."""
    return sum(file.stat().st_size for file in directory.glob("*")) if directory.is_dir() else 0


def remove_progress(directory: Path) -> None:
    """Remove a directory of progress, unless a run uses it."""
    with suppress(CoverageError):
        if directory.is_dir() and (handle := _locked(directory)) is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(handle)


class Progress:
    """The progress of one part of a run, in a directory that is created for the first file and locked while in use."""

    def __init__(self, directory: Path, part: str, description: Mapping[str, Any]):
        """Open the progress that an equal run has left, if there is any, and remove that of another run.

        Args:
            directory: see :func:`progress_directory`.
            part: name of the part; parts have descriptions and files of their own.
            description: JSON-ready; everything that must be equal for a run to go on.

        Raises:
            CoverageError: another run uses the directory.
        """
        self._directory, self._part = directory, part
        self._description = json.loads(json.dumps(description, sort_keys=True, default=str))
        self._handle: int | None = None
        self._announced = False
        # the thread of save_in_background, what it writes, and the copy that it writes from
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._copy: Tensor | None = None
        if directory.is_dir():
            self._open()

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under a name, in place of those that were kept under it.

        Raises:
            CoverageError: the file cannot be written; what was kept before is unchanged.
        """
        self.finish()
        self._write(self.place(name), {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})

    def save_in_background(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors and return: a thread keeps the copy, as :meth:`save` does.

        Files are written in the order of the calls, and a call first waits for the file of the one before it. So there
        is one copy at a time, in memory that is kept for the next one until :meth:`finish`.

        Raises:
            CoverageError: this file cannot be created, or that of the call before could not be written.
        """
        self._wait()
        path, copies = self.place(name), self._copied(tensors)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "progress")
        self._pending = self._writer.submit(self._write, path, copies)

    def finish(self) -> None:
        """Wait for the file that :meth:`save_in_background` writes.

        Raises:
            CoverageError: it could not be written.
        """
        try:
            self._wait()
        finally:
            self._copy = None

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors kept under a name, on the CPU; ``None`` if there are none or if they are damaged."""
        self.finish()
        path = self._path(name)
        if self._handle is None or not path.is_file():
            return None
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            # copies, because the alignment of tensors in a mapped file affects the last bit of what is computed
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a mapping
            if (file.metadata() or {}).get(CHECKSUM) == _checksum(tensors):
                return tensors
        self.discard(name)
        return None

    def discard(self, name: str) -> None:
        """Remove a damaged file and say so."""
        logger.warning(f"{self._path(name)} is damaged: it is removed, and its work is done again")
        self._path(name).unlink(missing_ok=True)

    def place(self, name: str) -> Path:
        """Return the file of a name, in a directory that exists, for a function that writes it.

        Raises:
            CoverageError: the directory cannot be created, or another run uses it.
        """
        if self._handle is None:
            self._open()
        if not self._announced:
            self._announced = True
            logger.info(f"Progress is kept in {self._directory}: if this run is killed, give the same command again")
        return self._path(name)

    def kept(self, name: str) -> Path | None:
        """Return the file of a name if there is one."""
        path = self._path(name)
        return path if self._handle is not None and path.is_file() else None

    def drop(self, *prefixes: str) -> None:
        """Remove what is kept under names with one of these prefixes."""
        self.finish()
        for file in self._files():
            if file.name.startswith(tuple(f"{self._part}.{prefix}" for prefix in prefixes)):
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory with all parts."""
        self.finish()
        if self._handle is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let other runs use the directory; it is removed if nothing is kept in it."""
        try:
            self.finish()
        except CoverageError as error:
            # the run ends by another error, and this file only saves work
            logger.warning(str(error))
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._handle is None:
            return
        if not list(self._directory.glob("*.safetensors")):
            shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._handle)
        self._handle = None

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, all in one piece of memory: new memory takes longer than the copies."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        cards = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if self._copy is None or self._copy.numel() < sum(sizes):
            # freed before its successor is allocated
            self._copy = None
            # copies from a card to memory that is not pinned take several times as long
            self._copy = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(cards))
        copies = {}
        for (key, tensor), place in zip(tensors.items(), self._copy[: sum(sizes)].split(sizes), strict=True):
            copy = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.detach(), non_blocking=True)
        for card in cards:
            torch.cuda.synchronize(card)
        return copies

    def _write(self, path: Path, stored: Mapping[str, Tensor]) -> None:
        def write(partial: Path) -> None:
            try:
                save_file(dict(stored), partial, {CHECKSUM: _checksum(stored)})
            except SafetensorError as error:
                # the class for a full disk too
                raise OSError(0, str(error)) from error

        write_atomically(path, write)

    def _open(self) -> None:
        try:
            while self._handle is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._handle = _locked(self._directory)
        except OSError as error:
            raise CoverageError(
                f"{self._directory} cannot be written ({error.strerror}): choose another output"
            ) from error
        described = self._directory / f"{self._part}.json"
        if self._files() and (differing := self._differing(described)):
            logger.info(
                f"The progress in {self._directory} is of another run ({', '.join(differing)} differ): it is removed"
            )
            for file in self._files():
                file.unlink(missing_ok=True)
        write_atomically(described, json.dumps(self._description, indent=1).encode())

    def _differing(self, described: Path) -> list[str]:
        try:
            found = json.loads(described.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            return ["all fields"]
        keys = sorted(found.keys() | self._description.keys())
        return [key for key in keys if found.get(key) != self._description.get(key)]

    def _files(self) -> list[Path]:
        return [file for file in self._directory.glob("*.safetensors") if file.name.startswith(f"{self._part}.")]

    def _path(self, name: str) -> Path:
        return self._directory / f"{self._part}.{name}.safetensors"


def _locked(directory: Path) -> int | None:
    """An open handle that locks the directory; ``None`` if it has been removed meanwhile."""
    handle = lock(directory)
    if handle is None and directory.is_dir():
        raise CoverageError(
            f"{directory} is in use by another run with this output: wait for its end, or choose another output"
        )
    return handle


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for key in sorted(tensors):
        tensor = tensors[key]
        value = zlib.crc32(f"{key} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
