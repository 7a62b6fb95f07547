"""When programs may start while the kernel before theirs still runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from moe_coverage_plugin.serving import kernels
from moe_coverage_plugin.serving.kernels.dependent_launch import launch_options, wait_for_previous_kernel
from moe_coverage_plugin.serving.kernels.tiles import choose_plan

WAIT = f"{wait_for_previous_kernel.fn.__name__}(PDL)"


def kernel_definitions() -> list[ast.FunctionDef]:
    modules = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(kernels.__path__[0]).glob("*.py")]
    functions = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if "tl.program_id(" in ast.unparse(node)]


@pytest.mark.parametrize("definition", kernel_definitions(), ids=lambda node: node.name)
def test_kernels_begin_with_the_wait(definition: ast.FunctionDef) -> None:
    """Otherwise a kernel could read too early, or let the next one start before the one before it has finished."""
    docstring, first, *_ = definition.body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(first) == WAIT


def test_all_kernels_were_found() -> None:
    assert len(kernel_definitions()) == 8


def test_a_cpu_has_no_early_launch() -> None:
    assert launch_options(torch.device("cpu")) == {"PDL": False, "launch_pdl": False}


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_few_programs_do_not_start_early(bits: int) -> None:
    """Of eight large experts; many programs do."""
    assert [starts_early(8, 4096, 11904, pairs, bits) for pairs in (8, 8192)] == [False, True]


def test_few_large_packed_experts_do_not_start_early() -> None:
    """Of DeepSeek-V3 at one token; at eight tokens they do."""
    assert [starts_early(256, 7168, 1664, pairs, 4) for pairs in (8, 64)] == [False, True]


def starts_early(experts: int, hidden: int, width: int, pairs: int, bits: int) -> bool:
    return choose_plan(pairs, experts, hidden, experts * hidden * width, bits).early
