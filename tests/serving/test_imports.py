"""Importing costs nothing until vLLM calls register(), and the serving half does not need the compressing one."""

import subprocess
import sys
from pathlib import Path

import pytest

from moe_coverage_plugin import serving

pytestmark = pytest.mark.slow


def modules_after(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_free() -> None:
    modules = modules_after("import moe_coverage_plugin.serving")
    assert not modules & {"torch", "vllm", "compressed_tensors", "transformers"}


def test_registration_needs_no_toolkit() -> None:
    modules = modules_after("from moe_coverage_plugin.serving import register; register()")
    assert "vllm" in modules
    assert "llmcompressor" not in modules
    halves = {f"moe_coverage_plugin.{half}" for half in ("modeling", "calibration", "checkpoint.saving", "modifiers")}
    assert not halves & modules


def test_the_serving_half_logs_through_vllm() -> None:
    files = Path(serving.__file__).parent.rglob("*.py")
    assert not [file for file in files if "loguru" in file.read_text()]
