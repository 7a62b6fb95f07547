"""Products in float32 of matrices in any dtype, and the setting of TF32, which must not stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.core.products import tf32_products, wide_product

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 4)),
    left=st.sampled_from(DTYPES),
    right=st.sampled_from(DTYPES),
)
def test_products_are_as_wide_as_float32(
    seed: int, shape: tuple[int, int, int], left: torch.dtype, right: torch.dtype
):
    """Also of no rows, and of a transposed matrix."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(inner, rows, generator=generator).to(left).T
    other = torch.randn(inner, columns, generator=generator).to(right)
    found = wide_product(one, other)
    assert found.dtype == (torch.float64 if torch.float64 in (left, right) else torch.float32)
    torch.testing.assert_close(found.double(), one.double() @ other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has no such product")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 24, 56), (37, 23, 5), (1, 129, 1)])
def test_products_of_16_bits_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int]):
    """Of matrices and of batches, of rows and of columns, and of parts of larger tensors."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(rows)
    left_DMA = torch.randn(3, rows, inner + 2, generator=generator).to("cuda", dtype)[..., 1:-1]
    right_DAN = torch.randn(3, columns, inner, generator=generator).to("cuda", dtype).mT
    for left, right in ((left_DMA, right_DAN), (right_DAN.mT, left_DMA.mT), (left_DMA[1], right_DAN[1])):
        found = wide_product(left, right)
        assert found.dtype == torch.float32
        # sums in float32 of products that are exact in it
        torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_tf32_ends_with_the_context(before: str):
    """Also after an error; and nothing changes if it is not wanted."""
    settings = torch.backends.cuda.matmul
    first = settings.fp32_precision
    settings.fp32_precision = before
    try:
        with pytest.raises(ValueError, match="inside"), tf32_products():  # noqa: PT012
            assert settings.fp32_precision == "tf32"
            raise ValueError("inside")
        assert settings.fp32_precision == before
        with tf32_products(enabled=False):
            assert settings.fp32_precision == before
        with tf32_products(), tf32_products():
            pass
        assert settings.fp32_precision == before
    finally:
        settings.fp32_precision = first
