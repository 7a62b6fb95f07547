"""The README's picture comes from the rows that lie in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import pareto


def test_draws_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pareto, "PICTURE", tmp_path / "picture.png")
    pareto.main()
    with (
        Image.open(tmp_path / "picture.png") as found,
        Image.open(Path(pareto.__file__).with_name("pareto.png")) as kept,
    ):
        assert found.size == kept.size


def test_shows_every_method_at_every_number_of_bits(monkeypatch: pytest.MonkeyPatch):
    shown = []
    monkeypatch.setattr(pareto, "write_pareto", lambda rows, _: shown.extend(rows))
    pareto.main()
    assert {(row.method, row.bits) for row in shown} == {(m, b) for m in pareto.METHODS for b in pareto.BITS}
