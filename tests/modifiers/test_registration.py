"""Importing the package registers the modifiers with the toolkit, in any order and any number of times."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from llmcompressor.modifiers import ModifierFactory

import moe_coverage_plugin
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


IMPORT_EACH_FIRST = """
import os, sys
import compressed_tensors, datasets, torch, transformers  # what takes long, and imports none of our modules
assert "llmcompressor" not in sys.modules
for module in sys.argv[1:]:
    if not (child := os.fork()):
        __import__(module)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"{module} cannot be imported first"
"""


@pytest.mark.slow
def test_any_module_may_be_imported_first():
    """Importing the toolkit imports our modifiers, which need the module that is being imported."""
    root = Path(moe_coverage_plugin.__file__).parent
    modules = ("modeling.moe_layers", "calibration.observer", "checkpoint.loading", "modifiers.alignment")
    command = [sys.executable, "-c", IMPORT_EACH_FIRST, *(f"{root.name}.{module}" for module in modules)]
    run = subprocess.run(command, cwd=root.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
