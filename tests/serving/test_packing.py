import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize as toolkit_dequantize

from moe_coverage_plugin.serving.packing import dequantize, packed_columns, unpack_int4, unpack_zero_points


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 200])
def test_unpack_is_the_toolkits(columns: int) -> None:
    values = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    packed = pack_to_int32(values, num_bits=4)
    assert packed.shape == (5, packed_columns(columns))
    assert torch.equal(unpack_int4(packed, columns), values)
    assert torch.equal(unpack_int4(packed, columns), unpack_from_int32(packed, 4, torch.Size((5, columns))))


def test_low_nibble_first_offset_by_eight() -> None:
    assert unpack_int4(torch.tensor([[0x7654_3210]], dtype=torch.int32), 8).tolist() == [
        [-8, -7, -6, -5, -4, -3, -2, -1]
    ]
    assert unpack_int4(torch.tensor([[-1]], dtype=torch.int32), 8).tolist() == [[7] * 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_dequantize_is_the_toolkits(dtype: torch.dtype, group_size: int | None, symmetric: bool) -> None:
    values = torch.randint(-8, 8, (6, 256), dtype=torch.int8)
    scale = torch.rand(6, 256 // (group_size or 256)).to(dtype)
    zeros = (
        torch.zeros(scale.shape, dtype=torch.int8) if symmetric else torch.randint(-8, 8, scale.shape).to(torch.int8)
    )
    strategy = QuantizationStrategy.GROUP if group_size else QuantizationStrategy.CHANNEL
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy=strategy, group_size=group_size)
    expected = toolkit_dequantize(values, scale, zero_point=zeros, args=args)
    words = pack_to_int32(zeros, num_bits=4, packed_dim=0)
    zero_point = None if symmetric else unpack_zero_points(words, 6)
    found = dequantize(pack_to_int32(values, num_bits=4), scale, 256, zero_point)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


def test_dequantize_of_no_columns() -> None:
    empty = dequantize(torch.zeros(4, 0, dtype=torch.int32), torch.zeros(4, 0), 0)
    assert empty.shape == (4, 0)
