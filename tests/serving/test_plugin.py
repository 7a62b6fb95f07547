"""The plugin is found by its entry point, and imports one half of the package.

That spawned processes, which inherit nothing, find it, is tested with the ranks and the server that they are.
"""

from __future__ import annotations

import json

import pytest

from tests import processes

pytestmark = pytest.mark.engine

FIND = """
import json, sys
# as in a process that has imported nothing of this package
for name in [each for each in sys.modules if each.partition(".")[0] == "moe_coverage_plugin"]:
    del sys.modules[name]
from vllm import plugins
from vllm.model_executor.layers import quantization
seen = ["moe_coverage" in quantization.QUANTIZATION_METHODS]
for _ in range(2):
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    seen.append(quantization.get_quantization_config("moe_coverage").__name__)
print(json.dumps([seen, [name for name in sys.modules if name.startswith(("moe_coverage_plugin", "llmcompressor"))]]))
"""


def test_it_is_found_by_its_entry_point() -> None:
    """Case 30: a process claims our checkpoints, whether the plugin is loaded once or twice."""
    done = processes.run("-c", FIND)
    assert done.returncode == 0, done.stderr[-3000:]
    seen, imported = json.loads(done.stdout.splitlines()[-1])
    assert seen == [False, "CoverageConfig", "CoverageConfig"]
    assert "moe_coverage_plugin.serving.config" in imported
    assert "llmcompressor" not in imported
    halves = {f"moe_coverage_plugin.{half}" for half in ("modeling", "calibration", "checkpoint.saving", "modifiers")}
    assert not halves & set(imported)
