"""What compilers make of the kernels, without a card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.kernels.compiled import SMALL_SHARED

REPOSITORY = Path(__file__).parents[3]
MULTIPLICATION = re.compile(r"(%\w+) = ttng\.warp_group_dot (%\w+), .*? : (tensor|!ttg\.memdesc)<")
WAIT = re.compile(r"ttng\.warp_group_dot_wait (%\w+).*pendings = (\d+)")


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What is compiled, by a process of its own, since the interpreter has the kernels of this one."""
    command = [sys.executable, "-m", "tests.serving.kernels.compiled"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels(answer: dict[str, Any]) -> dict[str, str]:
    """Compiled kernels by name."""
    return answer["code"]


def test_cards_of_little_shared_memory(answer: dict[str, Any]) -> None:
    """Such as those for workstations (compute capability 8.6, 8.9): a kernel that needs more does not start."""
    assert 64 * 1024 < answer["shared"] <= SMALL_SHARED


def test_no_operand_in_registers_is_overwritten_while_it_is_read(kernels: dict[str, str]) -> None:
    """Tensor cores of Hopper read them while the program goes on (triton-lang/triton#9433): it has to wait."""
    seen = 0
    for name, code in kernels.items():
        waits = dict(WAIT.findall(code))
        for result, _, operand in MULTIPLICATION.findall(code):
            if operand == "tensor":
                seen += 1
                assert waits.get(result) == "0", f"{name}: {result} is left unfinished"
    assert seen >= 8


@pytest.mark.parametrize("kind", ["16 bits, 128 pairs", "8 bits, 64 pairs"])
def test_operands_in_shared_memory_may_overlap(kernels: dict[str, str], kind: str) -> None:
    """What speed there is in 16 and 8 bits: nothing waits for a multiplication before the next one begins."""
    code = next(code for name, code in kernels.items() if kind in name)
    assert {operand for _, _, operand in MULTIPLICATION.findall(code)} == {"!ttg.memdesc"}
    assert "pendings = 1" in code
