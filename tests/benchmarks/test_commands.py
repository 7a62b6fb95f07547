"""Commands that are stored in results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commands import portable


def test_files_outside_of_the_working_directory_have_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--calibration", "c4=/data/c4.txt@100", "x=../y/x.txt", "--model", "m=models/mini", "--windows", "3"]
    expected = "--calibration c4=c4.txt@100 x=x.txt --model m=models/mini --windows 3"
    assert portable("benchmarks.allocation", arguments, ()) == f"python -m benchmarks.allocation {expected}"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--workers", "8", "--tables", "main", "--results", "out/2.jsonl"], " --tables main"),
        (["--bits", "4"], " --bits 4"),
        ([], ""),
    ],
)
def test_options_that_change_no_figure_are_left_out(arguments: list[str], kept: str):
    assert portable("benchmarks.m", arguments, {"--workers", "--results"}) == f"python -m benchmarks.m{kept}"
