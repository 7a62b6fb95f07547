"""Importing costs nothing until vLLM calls register(); ``test_plugin`` has what that imports."""

import subprocess
import sys
from pathlib import Path

from moe_coverage_plugin import serving


def test_import_is_free() -> None:
    program = "import moe_coverage_plugin.serving, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "compressed_tensors", "transformers"} & set(done.stdout.split())


def test_the_serving_half_logs_through_vllm() -> None:
    files = Path(serving.__file__).parent.rglob("*.py")
    assert not [file for file in files if "loguru" in file.read_text()]
