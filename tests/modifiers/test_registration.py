"""Importing the package makes the modifiers known to the toolkit, however often and in whatever order."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from harness import YAML, compress, pruning, widths
from llmcompressor.modifiers import ModifierFactory

import moe_coverage_plugin

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


def test_costs_nothing_without_the_toolkit():
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *a: None if name == 'llmcompressor' else find(name, *a);"
        "import moe_coverage_plugin; print(*sorted({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    root = Path(moe_coverage_plugin.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_any_module_may_be_imported_first():
    """The toolkit, imported by one of our modules, has our modifiers imported, which need that module."""
    package = Path(moe_coverage_plugin.__file__).parent
    compressing = [*package.glob("calibration/*.py"), *package.glob("surgery/*.py"), *package.glob("modifiers/*.py")]
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in compressing]
    # all that is heavy and not ours is imported once, and each of our modules in a fork of its own
    program = """
import importlib, os, sys
import torch, transformers, compressed_tensors, datasets
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    command = [sys.executable, "-c", program, *names]
    run = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
