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
