"""Quantization of activations to 8-bit floats."""

import pytest
import torch

from moe_coverage_plugin.serving.float8 import quantize_tokens
from moe_coverage_plugin.serving.kernels.quantization import quantize, quantize_channels

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def assert_equal(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    (q, scale), (expected_q, expected_scale) = found, expected
    torch.testing.assert_close(scale, expected_scale.flatten(), rtol=1e-6, atol=0)
    # the last bit of a card's division can differ, so values halfway between 8-bit floats can be rounded differently
    different = q.float() != expected_q.float()
    assert different.sum() <= 0.01 * q.numel()
    steps = (q.view(torch.uint8).int() - expected_q.view(torch.uint8).int()).abs()
    assert not (steps > 1).any()


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (2, 2050)])
def test_equals_reference(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_TH = (torch.randn(shape) * torch.tensor([[1e-3], [1.0], [300.0]])[: shape[0]]).to(device, dtype)
    assert_equal(quantize(x_TH), quantize_tokens(x_TH))


@dtypes
def test_zeros_and_nan(device: torch.device, dtype: torch.dtype) -> None:
    x_TH = torch.zeros(3, 20, dtype=dtype)
    x_TH[1, 3], x_TH[2, 3], x_TH[2, 4] = torch.finfo(dtype).smallest_normal, torch.nan, 1
    q_TH, scale_T = quantize(x_TH.to(device))
    assert not q_TH[0].float().any()
    assert not q_TH[:2].float().isnan().any()
    assert q_TH[2, 3].float().isnan()
    assert (scale_T > 0).all()


def test_only_channels_of_the_expert_are_quantized(device: torch.device) -> None:
    """Pairs without an expert and pairs of a removed expert have no channels."""
    widths_E, unit = [24, 0, 9], 16
    table_E4 = torch.tensor([[width, 0, 0, 0] for width in widths_E]).to(device)
    ids_M = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device)
    h_MN = torch.full((4, 48), torch.nan, dtype=torch.bfloat16, device=device)
    stored_M = [16, 32, 0, 0]
    for pair, stored in enumerate(stored_M):
        h_MN[pair, :stored] = torch.randn(stored)
    q_MN, scale_M = quantize_channels(h_MN, ids_M, table_E4, unit)
    for pair, stored in enumerate(stored_M):
        expected = quantize_tokens(h_MN[pair : pair + 1, :stored])
        assert_equal((q_MN[pair : pair + 1, :stored], scale_M[pair : pair + 1]), expected)
        assert q_MN[pair, stored:].float().isnan().all()
