"""Processes of an engine find the plugin by its entry point, and import one half, also if they inherit nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

# a program of its own: a pool imports the main module by name, and pytest gives this file none
FIND = """
import json, multiprocessing, sys

def found():
    from vllm.model_executor.layers import quantization
    from vllm import plugins
    seen = ["moe_coverage" in quantization.QUANTIZATION_METHODS]
    for _ in range(2):
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
        seen.append(quantization.get_quantization_config("moe_coverage").__name__)
    return seen, [name for name in sys.modules if name.startswith(("moe_coverage_plugin", "llmcompressor"))]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(found)))
"""


def test_spawned_processes_find_it_by_its_entry_point(tmp_path) -> None:
    """Case 30: ranks in spawned processes claim our checkpoints, whether the plugin is loaded once or twice."""
    program = tmp_path / "find.py"
    program.write_text(FIND)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen, imported = json.loads(done.stdout.splitlines()[-1])
    assert seen == [False, "CoverageConfig", "CoverageConfig"]
    assert "moe_coverage_plugin.serving.config" in imported
    assert "llmcompressor" not in imported
    halves = {f"moe_coverage_plugin.{half}" for half in ("modeling", "calibration", "checkpoint.saving", "modifiers")}
    assert not halves & set(imported)
