"""One bar for all passes of a run."""

import io
import re
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.calibration import job_bar
from moe_coverage_plugin.calibration.job_bar import JobBar, in_job, with_progress


class Shown:
    """A job's bar, and what it has printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]):
        self.text = io.StringIO()
        make = job_bar.tqdm
        # each update prints
        options = {"file": self.text, "mininterval": 0, "miniters": 1e-9}
        monkeypatch.setattr(job_bar, "tqdm", lambda **given: make(**given, **options))
        self.bar = JobBar(costs)

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in re.split(r"[\r\n]", self.text.getvalue()) if line.strip()]

    @property
    def percentages(self) -> list[int]:
        return [int(found[1]) for line in self.lines if (found := re.search(r"(\d+)%", line))]


def test_passes_share_one_bar_by_their_costs(monkeypatch: pytest.MonkeyPatch):
    shown = Shown(monkeypatch, {"First": 3.0, "Second": 1.0})
    with in_job(shown.bar):
        assert list(with_progress("abc", "First", total=3)) == ["a", "b", "c"]
        assert shown.percentages[-1] == 75
        assert list(with_progress("xy", "Second", total=2)) == ["x", "y"]
    assert shown.percentages[-1] == 100
    assert shown.percentages == sorted(shown.percentages)
    assert any(line.startswith("First 1/3, then second: ") for line in shown.lines)
    assert any(line.startswith("Second 1/2: ") for line in shown.lines)


def test_what_an_interrupted_run_has_done_is_skipped(monkeypatch: pytest.MonkeyPatch):
    """Steps of a pass, and passes before it."""
    shown = Shown(monkeypatch, {"First": 2.0, "Second": 2.0})
    with in_job(shown.bar):
        steps = iter(with_progress(["c", "d"], "Second", total=4, initial=2))
        assert (next(steps), next(steps)) == ("c", "d")
        assert shown.percentages[-1] == 88
        assert list(steps) == []
    # the speed is that of the two steps that this run has done
    assert shown.bar._bar.initial == 3.0


@given(
    st.dictionaries(st.sampled_from("ABCD"), st.floats(0.1, 9.0), min_size=1),
    st.integers(0, 5),
    st.booleans(),
    st.data(),
)
def test_any_passes_that_run_fill_the_bar(costs: dict[str, float], steps: int, first_rank: bool, data: st.DataObject):
    """Left out: any but the last one. Only the first rank shows its bar."""
    with patch.object(job_bar, "is_source_process", lambda: first_rank):
        bar = JobBar(costs)
    *others, last = costs
    run = [title for title in others if data.draw(st.booleans())]
    with in_job(bar):
        for title in [*run, last]:
            assert list(with_progress(range(steps), title, total=steps)) == list(range(steps))
    assert bar._bar.disable
    assert bar._done == pytest.approx(sum(costs.values()))
    if first_rank:
        assert bar._bar.n == bar._done


def test_other_passes_have_bars_of_their_own(capsys: pytest.CaptureFixture[str]):
    assert list(with_progress("ab", "Alone", total=2, unit="batch")) == ["a", "b"]
    with in_job(JobBar({"First": 1.0})):
        assert list(with_progress("ab", "Unknown", total=2)) == ["a", "b"]
    error = capsys.readouterr().err
    assert "Alone: 100%" in error
    assert "Unknown: 100%" in error
