"""``moe-coverage sample`` on a real tiny model, and its text as calibration data."""

import json
from pathlib import Path

import pytest

from moe_coverage_plugin import Manifest
from moe_coverage_plugin.cli import main
from tests.tiny import add_tokenizer, save_model

pytestmark = pytest.mark.slow


def test_the_text_of_a_model_calibrates_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = add_tokenizer(save_model(tmp_path / "model", num_hidden_layers=2, moe_intermediate_size=128))
    own, output = tmp_path / "own.jsonl", tmp_path / "out"
    assert main(["sample", str(source), "--output", str(own), "--samples", "6", "--length", "48"]) == 0
    printed = capsys.readouterr().out
    assert f"Wrote {own}" in printed
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    assert rows[0]["provenance"]["model"] == str(source)
    assert all(set(row["text"].split()) <= {f"w{token}" for token in range(512)} for row in rows)
    recipe = ["--recipe", "fisher_p50", "--recipe-args", "block_size=64"]
    data = ["--data", str(own), "--samples", "6", "--sequence-length", "32", "--output", str(output)]
    assert main(["oneshot", str(source), *recipe, *data]) == 0
    assert Manifest.from_checkpoint(output) is not None
