"""Importing the package registers the modifiers with the toolkit, in any order and any number of times."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from llmcompressor.modifiers import ModifierFactory

import moe_coverage_plugin
from tests import processes
from tests.modifiers.harness import YAML, compress, pruning, widths

NAMES = ["AlignmentModifier", "AttributionModifier", "ChannelPruningModifier", "CoverageModifier"]


def registered() -> dict[str, type]:
    options = {"CoverageModifier": {"sparsity": 0.25}}
    created = {
        name: ModifierFactory.create(name, allow_registered=True, allow_experimental=True, **options.get(name, {}))
        for name in NAMES
    }
    return {name: type(modifier) for name, modifier in created.items()}


def test_survives_refresh_and_second_import(source: Path):
    expected = {name: getattr(moe_coverage_plugin, name) for name in NAMES}
    assert registered() == expected
    ModifierFactory.refresh()
    assert registered() == expected
    importlib.reload(moe_coverage_plugin)
    assert registered() == expected
    assert widths(compress(source, YAML)) == widths(compress(source, pruning()))


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Pruner'"):
        moe_coverage_plugin.Pruner  # noqa: B018 - the access is the test


def test_imports_nothing_without_the_toolkit():
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *a: None if name == 'llmcompressor' else find(name, *a);"
        "import moe_coverage_plugin; print(*sorted({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    root = Path(moe_coverage_plugin.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


IMPORT_FIRST = """
import importlib, sys
again = ("llmcompressor", "compressed_tensors", "moe_coverage_plugin")
for name in [name for name in sys.modules if name.partition(".")[0] in again]:
    del sys.modules[name]
importlib.import_module(sys.argv[1])
assert "llmcompressor" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["modeling.moe_layers", "calibration.observer", "checkpoint.loading", "modifiers.alignment"]
)
def test_any_module_may_be_imported_first(module: str):
    """Importing the toolkit imports our modifiers, which need the module that is being imported."""
    # of what takes long to import, nothing imports our modules
    done = processes.run("-c", IMPORT_FIRST, f"moe_coverage_plugin.{module}")
    assert done.returncode == 0, done.stderr[-3000:]
