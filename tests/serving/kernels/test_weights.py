"""Weights in the layout of the kernels."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.serving.kernels.repacking import repack_int4
from moe_coverage_plugin.serving.kernels.weights import prepare, unsupported_reason
from moe_coverage_plugin.serving.ragged_weights import RaggedWeights
from tests.serving.kernels.random_layers import RandomLayer


def unpack(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Unpack signed values one by one, by the layout in the docstring of ``repack_int4``."""
    values = torch.empty(rows, columns, dtype=torch.int8)
    flat = packed.flatten().tolist()
    chunks = packed.shape[1]
    for row in range(rows):
        for column in range(columns):
            chunk, within = divmod(column, 32)
            high, within = divmod(within, 16)
            h, within = divmod(within, 8)
            t, i = divmod(within, 2)
            byte = flat[((row // 8 * chunks + chunk) * 8 + row % 8) * 16 + 4 * t + 2 * h + i]
            values[row, column] = (byte >> (4 * high) & 0xF) - 8
    return values


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_repacking_keeps_every_value(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)
    packed = repack_int4(pack_to_int32(values, num_bits=4), columns)
    assert packed.shape == (-(-rows // 16) * 2, -(-columns // 32), 8, 16)
    assert torch.equal(unpack(packed, rows, columns), values)
    # padding has the value 0, which is stored as 8
    assert int((packed & 0xF).long().sum() + (packed >> 4).long().sum()) == int(
        (values.long() + 8).sum() + 8 * (2 * packed.numel() - rows * columns)
    )


def flat_tensors(widths: list[int], hidden: int, group_size: int | None) -> RaggedWeights:
    words = [2 * sum(widths) * -(-hidden // 8), hidden * sum(-(-width // 8) for width in widths)]
    groups = [2 * sum(widths) * (hidden // (group_size or hidden))]
    groups.append(hidden * sum(width // (group_size or width) if width else 0 for width in widths))
    packed = [torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32) for n in words]
    return RaggedWeights(*packed, *(torch.rand(n) for n in groups))


def test_packed_weights_are_overwritten() -> None:
    loaded = flat_tensors([64, 0, 96], 64, 32)
    prepared = prepare(loaded, widths_E=[64, 0, 96], hidden=64, group_size=32).tensors
    for before, after in zip(loaded[:4], prepared[:4], strict=True):
        assert after.data_ptr() == before.data_ptr()
        assert after.nbytes == before.nbytes


def test_order_of_gate_and_up() -> None:
    widths, hidden = [64, 32], 64
    tensors = flat_tensors(widths, hidden, 32)
    w13, w13_scale = tensors.w13, tensors.w13_scale
    assert w13_scale is not None
    gate_up = [
        part.view(2, width, -1) for part, width in zip(w13.clone().split([64 * 16, 32 * 16]), widths, strict=True)
    ]
    scales = [part.view(2, width, 2) for part, width in zip(w13_scale.clone().split([256, 128]), widths, strict=True)]
    prepared = prepare(tensors, widths_E=widths, hidden=hidden, group_size=32).tensors
    assert prepared.w13_scale is not None
    second = prepared.w13[2 * 64 * 32 :].view(-1, 2, 8, 16)
    for channel in (0, 13, 31):
        for half in (0, 1):
            row = channel // 8 * 16 + half * 8 + channel % 8
            expected = repack_int4(gate_up[1][half, channel].view(1, -1), hidden)[0, :, 0]
            assert torch.equal(second[row // 8, :, row % 8], expected)
            offset = row // 16 * 16 + row % 8 * 2 + row % 16 // 8
            assert torch.equal(prepared.w13_scale[256:].view(2, 64)[:, offset], scales[1][half, channel])


def test_plain_weights_are_not_copied(device: torch.device) -> None:
    weights = RandomLayer(device, "plain-aligned").weights
    assert weights.unit == 128
    w13, w2 = torch.rand(2 * 40 * 64), torch.rand(64 * 40)
    weights = prepare(RaggedWeights(w13, w2), widths_E=[24, 0, 16], hidden=64, group_size=None)
    assert weights.tensors.w13 is w13
    assert weights.tensors.w2 is w2
    assert weights.unit == 8


def test_plain_rows_are_padded_to_8_channels() -> None:
    w2 = torch.rand(64 * 12)
    weights = prepare(RaggedWeights(torch.rand(2 * 12 * 64), w2), widths_E=[9, 3], hidden=64, group_size=None)
    first, second = weights.tensors.w2.split([64 * 16, 64 * 8])
    assert torch.equal(first.view(64, 16)[:, :9], w2[: 64 * 9].view(64, 9))
    assert torch.equal(second.view(64, 8)[:, :3], w2[64 * 9 :].view(64, 3))
    assert not first.view(64, 16)[:, 9:].any()
    assert not second.view(64, 8)[:, 3:].any()
    assert weights.table_E4.tolist() == [[9, 0, 0, 0], [3, 9, 2, 1]]


def test_table() -> None:
    weights = prepare(flat_tensors([64, 0, 96], 64, 32), widths_E=[64, 0, 96], hidden=64, group_size=32)
    assert weights.table_E4.tolist() == [[64, 0, 0, 0], [0, 64, 2, 2], [96, 64, 2, 2]]
    weights = prepare(flat_tensors([40, 0, 8], 64, None), widths_E=[40, 0, 8], hidden=64, group_size=None)
    assert weights.table_E4.tolist() == [[40, 0, 0, 0], [0, 40, 2, 1], [8, 40, 2, 1]]


@pytest.mark.parametrize(
    ("widths", "hidden", "group_size", "reason"),
    [
        ([48], 96, 48, "group size 48 is not a multiple of 32"),
        ([2**16], 2**14, None, "an expert of 65536 channels of 16384 needs 64-bit offsets inside a matrix"),
        ([96], 96, 32, None),
        ([0, 33], 100, None, None),
    ],
)
def test_unsupported_reason(widths: list[int], hidden: int, group_size: int | None, reason: str | None) -> None:
    assert unsupported_reason(widths, hidden, group_size, (8, 0)) == reason


def test_older_cards_are_unsupported() -> None:
    assert unsupported_reason([64], 64, None, (7, 5)) == "the kernels need compute capability 8.0, the card has 7.5"


def test_unsupported_8_bits() -> None:
    """Cards before Ada have no dot products of 8-bit floats, and rows must be a multiple of 16 bytes."""
    reason = "the kernels need compute capability 8.9 for 8-bit floats, the card has 8.6"
    assert unsupported_reason([64], 64, None, (8, 6), bits=8) == reason
    assert (
        unsupported_reason([64], 72, None, (8, 9), bits=8)
        == "hidden size 72 is not a multiple of 16, which 8-bit floats need"
    )
    assert unsupported_reason([0, 33], 96, None, (8, 9), bits=8) is None


def test_plain_rows_of_8_bits_are_padded_to_16_channels() -> None:
    w13, w2 = (torch.ones(n, dtype=torch.float8_e4m3fn) for n in (2 * 12 * 64, 64 * 12))
    scales = torch.rand(2 * 12), torch.rand(2 * 64)
    weights = prepare(RaggedWeights(w13, w2, *scales), widths_E=[9, 0, 3], hidden=64, group_size=None)
    first, second = weights.tensors.w2.split([64 * 16, 64 * 16])
    assert first.view(64, 16)[:, :9].float().all()
    assert not first.view(64, 16)[:, 9:].float().any()
    assert not second.view(64, 16)[:, 3:].float().any()
    assert (weights.bits, weights.unit) == (8, 16)
    assert weights.table_E4.tolist() == [[9, 0, 0, 0], [0, 9, 1, 1], [3, 9, 1, 1]]
