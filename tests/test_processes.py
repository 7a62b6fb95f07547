"""Forked programs behave as those of a fresh interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes

PROGRAM = """
import os, sys
print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ["MINE"], __name__, "HOME" in os.environ)
print("error", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
@pytest.mark.parametrize("status", [0, 3])
def test_is_what_an_interpreter_does(tmp_path: Path, kind: str, status: int) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    arguments = {"-c": ["-c", PROGRAM], "-m": ["-m", "mine"], "file": [str(tmp_path / "mine.py")]}[kind]
    arguments += [str(status), "a b"]
    environment = {"MINE": "x", "PATH": os.environ["PATH"]}
    expected = subprocess.run(
        [sys.executable, *arguments], input="text", capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    found = processes.run(*arguments, text="text", cwd=tmp_path, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (status, expected.stdout, expected.stderr)
    assert "mine" not in sys.modules


def test_errors_and_output_of_children() -> None:
    done = processes.run("-c", "import os; os.system('echo child'); raise ValueError('mine')")
    assert (done.returncode, done.stdout) == (1, "child\n")
    assert done.stderr.endswith("ValueError: mine\n")


def test_what_logs_since_it_was_imported() -> None:
    done = processes.run(
        "-c",
        "from loguru import logger; logger.warning('one'); import transformers; "
        "transformers.logging.get_logger('transformers').warning('two')",
    )
    assert done.returncode == 0
    assert "one" in done.stdout + done.stderr
    assert "two" in done.stderr


def test_ends_by_a_signal_or_a_timeout() -> None:
    sleeping = "print('ready', flush=True); import time; time.sleep(60)"
    program = processes.start("-c", sleeping)
    assert program.returncode is None
    while "ready" not in program.stdout:
        time.sleep(0.01)
    other = processes.run("-c", "print(1)")
    assert other.stdout == "1\n"
    program.send_signal(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run("-c", sleeping, timeout=0.2)


def test_ranks() -> None:
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    ranks = processes.start_ranks(2, "-c", code)
    processes.finish(ranks)
    assert [rank.stdout for rank in ranks] == ["0 2\n", "1 2\n"]
    failing = processes.start_ranks(2, "-c", "import os, time; 1 / int(os.environ['RANK']); time.sleep(60)")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        processes.finish(failing)
    assert failing[1].wait() == -signal.SIGKILL
