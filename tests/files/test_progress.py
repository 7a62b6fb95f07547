"""Files of progress that a thread writes: copies, order, one at a time, and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_coverage_plugin.files import progress
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.manifest import CoverageError

TENSORS = {
    "weight": torch.arange(35, dtype=torch.bfloat16).view(5, 7),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "eight": torch.ones(3).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "one": torch.tensor(7),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Progress]:
    with closing(Progress(tmp_path / ".out.progress", "run", {})) as each:
        yield each


def assert_kept(opened: Progress, name: str, expected: dict[str, Tensor]) -> None:
    found = opened.load(name)
    assert found is not None
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].float(), tensor.float())


def no_space(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Fail for one name of tensors."""
    if "other" in tensors:
        raise SafetensorError("No space left on device")
    save_file(tensors, path, metadata)


def test_what_a_thread_writes_is_what_the_call_was_given(opened: Progress):
    """Tensors are changed after the call, and later ones are larger or smaller than the memory of the copy."""
    expected = {}
    for number, rows in enumerate((3, 500, 2, 500)):
        changing = torch.full((rows, 8), float(number))
        expected[str(number)] = TENSORS | {"changing": changing.clone()}
        opened.save_in_background(str(number), TENSORS | {"changing": changing})
        changing.zero_()
    opened.save_in_background("empty", {})
    opened.finish()
    assert opened._copy is None
    for name, tensors in expected.items():
        assert_kept(opened, name, tensors)
    assert_kept(opened, "empty", {})


def test_files_are_equal_to_those_of_a_call_that_waits(opened: Progress):
    opened.save("one", TENSORS)
    opened.save_in_background("other", TENSORS)
    opened.finish()
    one, other = (opened.kept(name) for name in ("one", "other"))
    assert one is not None
    assert other is not None
    assert one.read_bytes() == other.read_bytes()


def test_one_file_at_a_time_is_written_while_the_caller_goes_on(opened: Progress, monkeypatch: pytest.MonkeyPatch):
    release, begun = threading.Event(), threading.Event()

    def slow(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        begun.set()
        assert release.wait(60)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(progress, "save_file", slow)
    opened.save_in_background("first", TENSORS)
    assert begun.wait(60)
    assert opened.kept("first") is None
    second = threading.Thread(target=opened.save_in_background, args=("second", TENSORS))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "there would be two copies"
    release.set()
    second.join(60)
    assert_kept(opened, "first", TENSORS)
    assert_kept(opened, "second", TENSORS)


@pytest.mark.parametrize("call", ["save_in_background", "save", "finish"])
def test_an_error_of_the_thread_is_raised_by_the_next_call(
    opened: Progress, monkeypatch: pytest.MonkeyPatch, call: str
):
    opened.save("kept", TENSORS)

    monkeypatch.setattr(progress, "save_file", no_space)
    opened.save_in_background("kept", {"other": torch.ones(1)})
    with pytest.raises(CoverageError, match=r"run\.kept\.safetensors cannot be written \(No space left on device\)"):
        getattr(opened, call)(*() if call == "finish" else ("next", TENSORS))
    assert_kept(opened, "kept", TENSORS)
    # the error is raised once
    opened.save_in_background("next", TENSORS)
    opened.finish()


def test_closing_waits_for_the_thread_and_only_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another error may be on its way then."""
    first = Progress(tmp_path / ".out.progress", "run", {})
    first.save_in_background("kept", TENSORS)
    first.close()
    with closing(Progress(tmp_path / ".out.progress", "run", {})) as second:
        assert_kept(second, "kept", TENSORS)
        monkeypatch.setattr(progress, "save_file", no_space)
        second.save_in_background("kept", {"other": torch.ones(1)})
    with closing(Progress(tmp_path / ".out.progress", "run", {})) as third:
        assert_kept(third, "kept", TENSORS)
