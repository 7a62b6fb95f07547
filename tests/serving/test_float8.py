import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.serving.float8 import linear, quantize_tokens
from tests.serving.random_experts import float8_values


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 70), st.integers(-20, 20))
def test_every_token_is_rounded_to_the_nearest(seed: int, tokens: int, channels: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, channels, generator=generator) * 2.0**exponent
    q_TH, scale_T1 = quantize_tokens(x_TH)
    found, expected = q_TH.double() * scale_T1.double(), float8_values(x_TH.double())
    # a value in the middle of two numbers may be rounded to either
    off = (found - expected).abs() > 1e-6 * expected.abs()
    error, least = (found - x_TH.double()).abs(), (expected - x_TH.double()).abs()
    assert (error[off] <= least[off] * (1 + 1e-5)).all()
    assert off.float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_of_zeros_and_of_almost_nothing(dtype: torch.dtype) -> None:
    x_TH = torch.zeros(2, 3, dtype=dtype)
    x_TH[1, 1] = torch.finfo(dtype).smallest_normal
    q_TH, scale_T1 = quantize_tokens(x_TH)
    assert not q_TH.float().isnan().any()
    assert not q_TH[0].float().any()
    assert (scale_T1 > 0).all()


def test_nan_stays_nan() -> None:
    q_TH, scale_T1 = quantize_tokens(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]))
    assert (q_TH.float() * scale_T1)[0, 1].isnan()
    assert not q_TH[1].float().isnan().any()


def test_linear() -> None:
    x_TH, weight = torch.randn(5, 32), torch.randn(7, 32)
    scale = weight.abs().amax(-1, keepdim=True) / 448
    q_weight, bias = (weight / scale).to(torch.float8_e4m3fn), torch.randn(7)
    expected = float8_values(x_TH.double()) @ (q_weight.double() * scale.double()).t() + bias
    torch.testing.assert_close(linear(x_TH, q_weight, scale, bias).double(), expected, rtol=1e-5, atol=1e-5)


def test_linear_without_channels_is_its_bias() -> None:
    weight, scale, bias = torch.empty(7, 0, dtype=torch.float8_e4m3fn), torch.empty(7, 0), torch.randn(7)
    assert torch.equal(linear(torch.empty(2, 0), weight, scale, bias), bias.expand(2, 7))
