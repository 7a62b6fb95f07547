"""Arithmetic functions of the kernels; each is tested in a separate kernel."""

import pytest
import torch
import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import apply_activation, mma, round_to
from moe_coverage_plugin.serving.kernels.int4 import apply_scale, subtract_zero_point, unpack_int4
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
sixteen_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@triton.jit
def unpack_kernel(packed_ptr, low_ptr, high_ptr, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    low, high = unpack_int4(tl.load(packed_ptr + index), DTYPE, INLINE_PTX)
    tl.store(low_ptr + index, low)
    tl.store(high_ptr + index, high)


@pytest.mark.parametrize("inline_ptx", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_int4(device: torch.device, dtype: torch.dtype, inline_ptx: bool) -> None:
    if inline_ptx and dtype == torch.float32:
        pytest.skip("inline PTX is for 16-bit dtypes")
    packed = torch.arange(256).repeat(2).to(device, torch.uint8)
    low, high = (torch.empty(512, dtype=dtype, device=device) for _ in range(2))
    unpack_kernel[(1,)](packed, low, high, DTYPES[dtype], inline_ptx, 512)
    assert torch.equal(low, ((packed & 15).float() - 8).to(dtype))
    assert torch.equal(high, ((packed >> 4).float() - 8).to(dtype))


@triton.jit
def round_kernel(x_ptr, y_ptr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y_ptr + index, round_to(tl.load(x_ptr + index), DTYPE))


@sixteen_bits
def test_round_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    ties = 1 + eps * (torch.arange(64) + 0.5)
    x = torch.cat(
        [ties, -ties, torch.randn(120), torch.tensor([0.0, -0.0, torch.inf, -torch.inf]), 2 - ties[:4] * 1e-9]
    )
    x = x.to(device)
    found = torch.empty(256, dtype=dtype, device=device)
    round_kernel[(1,)](x, found, DTYPES[dtype], 256)
    assert torch.equal(found, x.to(dtype))


def test_round_to_8_bits(device: torch.device) -> None:
    """Inputs are all values, the middles between adjacent values, and numbers slightly above and below each middle."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.zeros(6)])
    x = torch.cat([x, -x, torch.tensor([torch.nan])]).to(device)
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    found = torch.empty(2048, dtype=torch.float8_e4m3fn, device=device)
    round_kernel[(1,)](x, found, tl.float8e4nv, 2048)
    torch.testing.assert_close(found.float(), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def dequantize_kernel(x_ptr, zero_point_ptr, scale_ptr, y_ptr, INLINE_PTX: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    y = subtract_zero_point(tl.load(x_ptr + index), tl.load(zero_point_ptr + index), INLINE_PTX)
    tl.store(y_ptr + index, apply_scale(y, tl.load(scale_ptr + index), INLINE_PTX))


@pytest.mark.parametrize("inline_ptx", [False, True])
@sixteen_bits
def test_dequantized_weights_are_rounded_once(device: torch.device, dtype: torch.dtype, inline_ptx: bool) -> None:
    x, zero_point = (torch.randint(-8, 8, (512,)).to(device, dtype) for _ in range(2))
    scale = torch.rand(512).to(device, dtype)
    found = torch.empty(512, dtype=dtype, device=device)
    dequantize_kernel[(1,)](x, zero_point, scale, found, inline_ptx, 512)
    assert torch.equal(found, (x - zero_point) * scale)


@triton.jit
def mma_kernel(x_ptr, w_ptr, y_ptr, SWAP_AB: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    offsets = index[:, None] * SIZE + index[None, :]
    x, w = tl.load(x_ptr + offsets), tl.load(w_ptr + offsets)
    tl.store(y_ptr + offsets, mma(x, w, tl.zeros((SIZE, SIZE), dtype=tl.float32), SWAP_AB))


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(device: torch.device, dtype: torch.dtype, swap_ab: bool) -> None:
    x, w = (torch.randn(32, 32).to(device, dtype) for _ in range(2))
    found = torch.empty(32, 32, device=device)
    mma_kernel[(1,)](x, w, found, swap_ab, 32)
    expected = w.double() @ x.double().t() if swap_ab else x.double() @ w.double().t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def activation_kernel(x_ptr, y_ptr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y_ptr + index, apply_activation(tl.load(x_ptr + index), ACTIVATION))


@pytest.mark.filterwarnings(
    "ignore:overflow"
)  # NumPy warns about exp(200) in a sigmoid, whose result is correctly zero
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_apply_activation(device: torch.device, activation: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 254), torch.tensor([-200.0, 200.0])]).to(device)
    found = torch.empty_like(x)
    activation_kernel[(1,)](x, found, activation, 256)
    expected = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
