import pytest
import torch
import triton
import triton.language as tl

from moe_coverage_plugin.serving.kernels.arithmetic import activated, dot_tokens, nibbles, rounded, scaled
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@triton.jit
def nibbles_kernel(packed_ptr, low_ptr, high_ptr, DTYPE: tl.constexpr, FAST: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    low, high = nibbles(tl.load(packed_ptr + place), DTYPE, FAST)
    tl.store(low_ptr + place, low)
    tl.store(high_ptr + place, high)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nibbles(device: torch.device, dtype: torch.dtype, fast: bool) -> None:
    if fast and dtype == torch.float32:
        pytest.skip("inline assembly makes 16-bit values")
    packed = torch.arange(256).repeat(2).to(device, torch.uint8)
    low, high = (torch.empty(512, dtype=dtype, device=device) for _ in range(2))
    nibbles_kernel[(1,)](packed, low, high, DTYPES[dtype], fast, 512)
    assert torch.equal(low, ((packed & 15).float() - 8).to(dtype))
    assert torch.equal(high, ((packed >> 4).float() - 8).to(dtype))


@triton.jit
def rounded_kernel(x_ptr, y_ptr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y_ptr + place, rounded(tl.load(x_ptr + place), DTYPE))


@halves
def test_rounded_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    ties = 1 + eps * (torch.arange(64) + 0.5)
    x = torch.cat(
        [ties, -ties, torch.randn(120), torch.tensor([0.0, -0.0, torch.inf, -torch.inf]), 2 - ties[:4] * 1e-9]
    )
    x = x.to(device)
    found = torch.empty(256, dtype=dtype, device=device)
    rounded_kernel[(1,)](x, found, DTYPES[dtype], 256)
    assert torch.equal(found, x.to(dtype))


def test_rounded_to_8_bits(device: torch.device) -> None:
    """Every value, the middle of every two, and what lies at either side of the middle."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.zeros(6)])
    x = torch.cat([x, -x, torch.tensor([torch.nan])]).to(device)
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    found = torch.empty(2048, dtype=torch.float8_e4m3fn, device=device)
    rounded_kernel[(1,)](x, found, tl.float8e4nv, 2048)
    torch.testing.assert_close(found.float(), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def scaled_kernel(x_ptr, scale_ptr, y_ptr, FAST: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y_ptr + place, scaled(tl.load(x_ptr + place), tl.load(scale_ptr + place), FAST))


@pytest.mark.parametrize("fast", [False, True])
@halves
def test_scaled_is_one_rounding(device: torch.device, dtype: torch.dtype, fast: bool) -> None:
    x = torch.randint(-8, 8, (512,)).to(device, dtype)
    scale = torch.rand(512).to(device, dtype)
    found = torch.empty(512, dtype=dtype, device=device)
    scaled_kernel[(1,)](x, scale, found, fast, 512)
    assert torch.equal(found, x * scale)


@triton.jit
def dot_kernel(w_ptr, x_ptr, y_ptr, SWAP: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    places = place[:, None] * SIZE + place[None, :]
    acc = dot_tokens(tl.load(w_ptr + places), tl.load(x_ptr + places), tl.zeros((SIZE, SIZE), dtype=tl.float32), SWAP)
    tl.store(y_ptr + places, acc)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dot(device: torch.device, dtype: torch.dtype, swap: bool) -> None:
    w, x = (torch.randn(32, 32).to(device, dtype) for _ in range(2))
    found = torch.empty(32, 32, device=device)
    dot_kernel[(1,)](w, x, found, swap, 32)
    expected = w.double() @ x.double().t() if swap else x.double() @ w.double().t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def activated_kernel(x_ptr, y_ptr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y_ptr + place, activated(tl.load(x_ptr + place), ACTIVATION))


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, of an exponential that makes a sigmoid zero
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated(device: torch.device, activation: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 254), torch.tensor([-200.0, 200.0])]).to(device)
    found = torch.empty_like(x)
    activated_kernel[(1,)](x, found, activation, 256)
    expected = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
