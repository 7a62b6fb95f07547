import json
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report.results import ResultRow, mean_of_repetitions, read_results

GOOD = {"name": "25 %", "method": "paper", "bytes": 1000, "loss": 2.5}


def written(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    full = GOOD | {"sparsity": 0.25, "bits": 4, "model": "tiny", "seed": 3}
    path = written(tmp_path, json.dumps(full | {"note": [1]}), "", json.dumps(GOOD | {"seed": None}), "  ", "")
    assert read_results(path) == [ResultRow(**full), ResultRow(**GOOD)]
    assert asdict(read_results(path)[0]) == full


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "a"', "is not JSON"),
        (b'{"name": "\xff"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", r"is \[1, 2\], not an object"),
        ('{"name": "a", "loss": 1}', "lacks method, bytes"),
        (json.dumps(GOOD | {"bytes": 0}), "has bytes 0, expected a whole number, at least 1"),
        (json.dumps(GOOD | {"bytes": 1e6}), "has bytes 1000000.0, expected a whole number"),
        (json.dumps(GOOD | {"bytes": True}), "has bytes true, expected a whole number"),
        (json.dumps(GOOD | {"bytes": 10**400}), "has bytes 1000.*…, expected a finite number"),
        (json.dumps(GOOD | {"loss": "2.5"}), 'has loss "2.5", expected a number'),
        (json.dumps(GOOD | {"loss": None}), "has loss null, expected a number"),
        (json.dumps(GOOD | {"loss": float("nan")}), "has loss NaN, expected a finite number"),
        (json.dumps(GOOD | {"loss": float("inf")}), "has loss Infinity, expected a finite number"),
        (json.dumps(GOOD | {"method": 3}), "has method 3, expected text"),
        (json.dumps(GOOD | {"sparsity": "half"}), 'has sparsity "half", expected a number'),
        (json.dumps(GOOD | {"seed": 0.5}), "has seed 0.5, expected a whole number"),
    ],
)
def test_damaged_lines_are_reported_by_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", line, json.dumps(GOOD))
    with pytest.raises(CoverageError, match=f"line 3 {message}") as error:
        read_results(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="No such file"):
        read_results(tmp_path / "none.jsonl")


rows = st.builds(
    ResultRow,
    name=st.sampled_from("ab"),
    method=st.sampled_from("xy"),
    bytes=st.integers(1, 100),
    loss=st.floats(-10, 10),
    sparsity=st.sampled_from([None, 0.25]),
    seed=st.integers(0, 9),
)


@given(st.lists(rows, max_size=12))
def test_means_are_over_rows_that_differ_in_seed_bytes_and_loss(several: list[ResultRow]) -> None:
    means = mean_of_repetitions(several)
    assert sum(mean.count for mean in means) == len(several)
    keys = [(mean.name, mean.method, mean.model, mean.sparsity, mean.bits) for mean in means]
    assert keys == list(dict.fromkeys((row.name, row.method, row.model, row.sparsity, row.bits) for row in several))
    for mean, key in zip(means, keys, strict=True):
        members = [row for row in several if (row.name, row.method, row.model, row.sparsity, row.bits) == key]
        losses = [row.loss for row in members]
        assert mean.loss == pytest.approx(statistics.fmean(losses))
        assert mean.bytes == pytest.approx(statistics.fmean(row.bytes for row in members))
        assert mean.spread == pytest.approx(statistics.stdev(losses) if len(losses) > 1 else 0, abs=1e-9)
