"""Kernels that are compiled before serving."""

import pytest
import torch
import triton
from hypothesis import example, given
from hypothesis import strategies as st

from moe_coverage_plugin.serving.kernels import compilation
from moe_coverage_plugin.serving.kernels.compilation import compile_ahead, plans_and_tokens
from moe_coverage_plugin.serving.kernels.launch import ragged_experts
from moe_coverage_plugin.serving.kernels.routing import one_kernel_step
from moe_coverage_plugin.serving.kernels.tiles import LARGE_SHARED_MEMORY, LaunchPlan, choose_plan
from tests.serving.kernels.random_layers import TOP_K, RandomLayer

pytestmark = pytest.mark.slow


def kernels(plan: LaunchPlan, pairs: int) -> tuple[object, ...]:
    """Return the parameters that determine the compiled kernels for one kind of layer."""
    return plan, plan.path == "tiled" and one_kernel_step(pairs)


@given(
    tokens=st.integers(1, 40_000),
    top_k=st.integers(1, 12),
    experts=st.integers(1, 256),
    hidden=st.sampled_from([512, 2048, 7168]),
    width=st.integers(0, 16_384),
    bits=st.sampled_from([4, 8, 16]),
    shared=st.sampled_from([99 * 1024, LARGE_SHARED_MEMORY]),
)
@example(128, 8, 128, 2048, 640, 16, LARGE_SHARED_MEMORY)
@example(129, 8, 128, 2048, 640, 4, LARGE_SHARED_MEMORY)
@example(2, 2, 8, 4096, 11_904, 4, LARGE_SHARED_MEMORY)
@example(8192, 8, 128, 2048, 640, 16, 99 * 1024)
def test_all_numbers_of_tokens_use_kernels_compiled_ahead(
    tokens: int, top_k: int, experts: int, hidden: int, width: int, bits: int, shared: int
) -> None:
    """Case 27: no request waits for a compilation or fails because of one."""
    ahead = {kernels(plan, each * top_k) for plan, each in plans_and_tokens(bits, 2, top_k, shared)}
    pairs = tokens * top_k
    assert kernels(choose_plan(pairs, experts, hidden, experts * hidden * width, bits, 2, shared), pairs) in ahead


@pytest.mark.parametrize("scheme", ["plain", "group-32", "group-32-zeros"])
def test_a_kind_of_layer_is_compiled_once(device: torch.device, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(compilation, "ONE_KERNEL_LIMITS", ((2, 64), (4, 1024)))  # fewer tokens for the interpreter
    weights = RandomLayer(device, scheme, torch.float32).weights
    assert compile_ahead(weights, TOP_K, torch.float32, "silu", False)
    assert not compile_ahead(weights, TOP_K, torch.float32, "silu", False)
    assert compile_ahead(weights, TOP_K, torch.float32, "silu", True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["plain-aligned", "group-64"])
def test_nothing_is_compiled_while_serving(device: torch.device, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    layer = RandomLayer(device, scheme)
    compile_ahead(layer.weights, TOP_K, torch.bfloat16, "silu", False)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"]))
    for tokens in (1, 3, 8, 33, 129, 520, 700, 3000):
        ragged_experts(*layer.inputs(tokens), layer.weights)
    assert not compiled
