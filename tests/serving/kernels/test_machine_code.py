"""Properties of compiled kernels, which are tested without a card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.serving.kernels.compiled import SMALL_SHARED_MEMORY

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
DOT = re.compile(r"(%\w+) = ttng\.warp_group_dot (%\w+), .*? : (tensor|!ttg\.memdesc)<")
WAIT = re.compile(r"ttng\.warp_group_dot_wait (%\w+).*pendings = (\d+)")


@pytest.fixture(scope="module")
def output() -> dict[str, Any]:
    """Output of ``compiled``, which runs in another process because kernels may be interpreted in this one."""
    command = [sys.executable, "-m", "tests.serving.kernels.compiled"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels(output: dict[str, Any]) -> dict[str, str]:
    """TTGIR of compiled kernels by name."""
    return output["code"]


def test_kernels_fit_into_small_shared_memory(output: dict[str, Any]) -> None:
    """Workstation cards (compute capability 8.6 and 8.9) cannot start a kernel that needs more."""
    assert 64 * 1024 < output["shared"] <= SMALL_SHARED_MEMORY


def test_dots_with_operands_in_registers_are_waited_for(kernels: dict[str, str]) -> None:
    """``wait_for_dot`` works (triton-lang/triton#9433): no such dot product is pending when the next step begins."""
    seen = 0
    for name, code in kernels.items():
        waits = dict(WAIT.findall(code))
        for result, _, operand in DOT.findall(code):
            if operand == "tensor":
                seen += 1
                assert waits.get(result) == "0", f"{name}: {result} is still pending"
    assert seen >= 8


def test_wait_for_dot_is_still_needed() -> None:
    """This test fails when the oldest supported vLLM changes, on which the need for the workaround depends.

    vLLM 0.26 comes with Triton 3.6, whose ptxas for sm_90 is older than 13.3. If the new oldest vLLM comes with Triton
    3.9 or newer, remove ``wait_for_dot`` and the test above; otherwise update the version here.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.search(r"vllm>=([\d.]+)", " ".join(project["optional-dependencies"]["serve"]))
    assert oldest is not None
    assert oldest[1] == "0.26"


def test_packed_weights_of_few_pairs_stay_in_their_threads(kernels: dict[str, str]) -> None:
    """A thread loads its four adjacent bytes as one word, and no weight moves to another thread."""
    narrow = {name: code for name, code in kernels.items() if "4 bits, 8 pairs" in name}
    assert len(narrow) >= 4
    for name, code in narrow.items():
        layouts = dict(re.findall(r"^(#\w+) = #ttg.linear<\{register = (.*?), lane", code, re.MULTILINE))
        loads = re.findall(r"ttg.local_load .*xi8, .*-> tensor<\w+xi8, (#\w+)>", code)
        assert loads, name
        assert all(layouts[layout].startswith("[[0, 1], [0, 2],") for layout in loads), name
        loop = code[code.index("scf.for") :]
        loop = loop[: loop.index("scf.yield")]
        assert not re.search(r"ttg.convert_layout .* : tensor<\d+x\d+x(i8|bf16), ", loop), name


@pytest.mark.parametrize("kind", ["16 bits, 128 pairs", "8 bits, 64 pairs", "8 bits, 128 pairs"])
def test_dots_with_operands_in_shared_memory_overlap(kernels: dict[str, str], kind: str) -> None:
    """With 16 and 8 bits, kernels are fast only if a dot product can be pending when the next one begins."""
    code = next(code for name, code in kernels.items() if kind in name)
    assert {operand for _, _, operand in DOT.findall(code)} == {"!ttg.memdesc"}
    assert "pendings = 1" in code


def test_sums_of_8_bit_floats_are_promoted_except_with_many_pairs(kernels: dict[str, str]) -> None:
    found = {name: code for name, code in kernels.items() if "8 bits" in name}
    assert len(found) == 4
    for name, code in found.items():
        steps = set(re.findall(r"maxNumImpreciseAcc = (\d+)", code))
        assert steps == ({"128"} if "64 pairs" in name else {str(2**30)}), name
