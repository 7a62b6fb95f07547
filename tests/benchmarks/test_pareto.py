"""The README's picture is drawn from the rows in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import pareto


def test_picture_has_the_size_of_the_stored_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pareto, "PICTURE", tmp_path / "picture.png")
    pareto.main()
    with (
        Image.open(tmp_path / "picture.png") as found,
        Image.open(Path(pareto.__file__).with_name("pareto.png")) as stored,
    ):
        assert found.size == stored.size
