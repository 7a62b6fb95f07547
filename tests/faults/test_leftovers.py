"""The next run removes what a killed run left beside its output, but not what a running process writes."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.checkpoint.staging import check_output, staged
from moe_coverage_plugin.files.atomic import in_use, remove_leftovers, write_atomically
from tests import processes

pytestmark = pytest.mark.slow

WRITER = """
import sys, time
from pathlib import Path
from moe_coverage_plugin.files.atomic import in_use

with in_use(lambda: Path(sys.argv[1])), in_use(lambda: Path(sys.argv[2])):
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def partials(tmp_path: Path) -> tuple[Path, Path]:
    """A partial directory and a partial file, as runs write them."""
    directory, file = tmp_path / ".out.ab12_cd3.partial", tmp_path / ".scores.safetensors.77.partial"
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "model.safetensors").write_bytes(b"half")
    file.write_bytes(b"half")
    return directory, file


def test_is_removed_once_its_writer_ended(tmp_path: Path, partials: tuple[Path, Path]) -> None:
    directory, file = partials
    writer = processes.start("-c", WRITER, *partials)
    while writer.stdout != "writing\n":
        assert writer.returncode is None, writer.stderr
        time.sleep(0.01)
    check_output(tmp_path / "out")
    write_atomically(tmp_path / "scores.safetensors", b"complete")
    assert directory.is_dir()
    assert file.is_file()
    writer.kill()
    writer.wait()
    check_output(tmp_path / "out")
    assert not directory.exists()
    write_atomically(tmp_path / "scores.safetensors", b"complete")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.safetensors"]


def test_partials_of_this_process_stay(tmp_path: Path, partials: tuple[Path, Path]) -> None:
    with in_use(lambda: partials[0]):
        assert remove_leftovers(tmp_path / "out") == []
    assert remove_leftovers(tmp_path / "out") == [partials[0]]


@pytest.mark.parametrize("moment", ["before it is opened", "while it is locked", "after it was opened"])
def test_what_another_process_takes_for_a_leftover_is_created_again(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks check and write one output at the same time."""
    created: list[Path] = []

    def create() -> Path:
        created.append(tmp_path / f".out.{len(created)}.partial")
        created[-1].mkdir()
        if len(created) == 1 and moment == "before it is opened":
            assert remove_leftovers(tmp_path / "out") == created
        return created[-1]

    lock = fcntl.flock

    def lock_late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        if moment == "while it is locked":
            lock(other := os.open(created[0], os.O_RDONLY), operation)
            with pytest.raises(BlockingIOError):
                lock(handle, operation)
            created[0].rmdir()
            os.close(other)
            raise BlockingIOError
        assert remove_leftovers(tmp_path / "out") == created
        lock(handle, operation)

    if moment != "before it is opened":
        monkeypatch.setattr(fcntl, "flock", lock_late)
    with in_use(create) as partial:
        assert partial == created[1]
        assert remove_leftovers(tmp_path / "out") == []
    assert [path.name for path in tmp_path.iterdir()] == [".out.1.partial"]


def test_processes_that_check_and_write_the_same_output(tmp_path: Path) -> None:
    def write() -> None:
        for _ in range(150):
            check_output(tmp_path / "out")
            with staged(tmp_path / "out", writes=False) as directory:
                (directory / "file").touch()

    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            # a child must not return into pytest, whatever happens
            status = 1
            try:
                write()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_other_files_stay(tmp_path: Path, partials: tuple[Path, Path]) -> None:
    (tmp_path / "mine").mkdir()
    names = [".out.partial", ".out2.ab.partial", ".out.a.b.partial", "out.ab.partial", ".out.ab.partial.txt", "out"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".out.link.partial").symlink_to(tmp_path / "mine")
    removed = remove_leftovers(tmp_path / "out")
    assert removed == [partials[0]]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "mine", ".out.link.partial", partials[1].name}
    assert remove_leftovers(tmp_path / "absent" / "out") == []


def test_a_directory_with_another_model_keeps_what_is_beside_it(tmp_path: Path, partials: tuple[Path, Path]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    with pytest.raises(ValueError, match="not of this model"):
        check_output(tmp_path / "out")
    assert partials[0].is_dir()


def test_a_staged_directory_of_a_killed_process_has_no_config(tmp_path: Path) -> None:
    """Stock vLLM opened complete weights of unequal widths with the toolkit's config, and computed NaN."""
    if (child := os.fork()) == 0:
        with staged(tmp_path / "out") as directory:
            for name in ("config.json", "model.safetensors"):
                (directory / name).write_text("{}")
            is_written = (directory / "config.json").read_text() == "{}"
            os.kill(os.getpid(), signal.SIGKILL if is_written else signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "model.safetensors").exists()
    assert not (left / "config.json").exists()
    with pytest.raises(CoverageError, match="is not a pruned checkpoint"):
        load(left)


def test_two_runs_can_write_beside_each_other(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as first, staged(tmp_path / "other") as second:
        check_output(tmp_path / "out")
        check_output(tmp_path / "other")
        for directory in (first, second):
            (directory / "config.json").unlink()
            (directory / "file").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}
