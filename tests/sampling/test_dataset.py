"""Text that a model writes itself as a data set in Python, as the README has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_coverage_plugin import Manifest
from tests.tiny import add_tokenizer, save_model

pytestmark = pytest.mark.slow

# in an interpreter of its own, because others have opened models of the family in other ways
QUICK_START = """
import sys
from llmcompressor import oneshot
from moe_coverage_plugin import recommended_recipe, sample_text

path, output = sys.argv[1:]
data = sample_text(path, samples=4, length=16)
oneshot(model=path, dataset=data, recipe=recommended_recipe(0.5, block_size=64, scheme=None), output_dir=output)
"""


def test_a_model_is_opened_in_the_usual_way_after_it_wrote(tmp_path: Path) -> None:
    source = add_tokenizer(save_model(tmp_path / "source", num_hidden_layers=1, moe_intermediate_size=128))
    command = [sys.executable, "-c", QUICK_START, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Manifest.from_checkpoint(tmp_path / "out") is not None
