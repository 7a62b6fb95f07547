import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import silu

from moe_coverage_plugin.core.ragged import (
    ExpertWeights,
    channel_order,
    kept_channels,
    prefix_scores,
    reference_moe,
    sort_descending,
)
from moe_coverage_plugin.manifest import CoverageError

T, K, E, H, I = 11, 2, 4, 6, 8  # noqa: E741 - the axis letters


def make_experts(generator: torch.Generator, bias: bool) -> list[ExpertWeights]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return [
        ExpertWeights(randn(I, H), randn(I, H), randn(H, I), *((randn(I), randn(I), randn(H)) if bias else ()))
        for _ in range(E)
    ]


def make_routing(generator: torch.Generator, experts: int = E) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TE = torch.rand(T, experts, dtype=torch.float64, generator=generator)
    topk_weights_TK, topk_ids_TK = weights_TE.topk(K, dim=-1)
    return topk_ids_TK, topk_weights_TK


def slice_expert(expert: ExpertWeights, kept_N: torch.Tensor) -> ExpertWeights:
    return ExpertWeights(
        expert.gate_NH[kept_N],
        expert.up_NH[kept_N],
        expert.down_HN[:, kept_N],
        None if expert.gate_bias_N is None else expert.gate_bias_N[kept_N],
        None if expert.up_bias_N is None else expert.up_bias_N[kept_N],
        expert.down_bias_H,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_reference_equals_the_dense_formula(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = make_experts(generator, bias)
    ids_TK, weights_TK = make_routing(generator)
    x_TH = torch.randn(T, H, dtype=torch.float64, generator=generator)

    # all experts compute all tokens, and a dense matrix of routing weights combines their outputs
    gate_EIH, up_EIH, down_EHI = (torch.stack([e[i] for e in experts]) for i in range(3))  # pyright: ignore[reportArgumentType] - the first three are never None
    gate_TEI = torch.einsum("th,eih->tei", x_TH, gate_EIH)
    up_TEI = torch.einsum("th,eih->tei", x_TH, up_EIH)
    if bias:
        gate_TEI = gate_TEI + torch.stack([e.gate_bias_N for e in experts])  # pyright: ignore[reportArgumentType] - biases exist here
        up_TEI = up_TEI + torch.stack([e.up_bias_N for e in experts])  # pyright: ignore[reportArgumentType] - as above
    z_TEH = torch.einsum("tei,ehi->teh", gate_TEI * gate_TEI.sigmoid() * up_TEI, down_EHI)
    if bias:
        z_TEH = z_TEH + torch.stack([e.down_bias_H for e in experts])  # pyright: ignore[reportArgumentType] - as above
    routing_TE = torch.zeros(T, E, dtype=torch.float64).scatter(1, ids_TK, weights_TK)
    expected_TH = torch.einsum("te,teh->th", routing_TE, z_TEH)

    torch.testing.assert_close(reference_moe(x_TH, ids_TK, weights_TK, experts, silu), expected_TH, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_slicing_then_forward_equals_masking_then_forward(bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    experts = make_experts(generator, bias)
    ids_TK, weights_TK = make_routing(generator)
    x_TH = torch.randn(T, H, dtype=torch.float64, generator=generator)
    scores_LEI = torch.rand(1, E, I, generator=generator)
    widths_LE = torch.tensor([[1, I, 5, 3]])

    kept = kept_channels(scores_LEI, widths_LE)[0]
    sliced = [slice_expert(expert, kept_N) for expert, kept_N in zip(experts, kept, strict=True)]
    masked = []
    for expert, kept_N in zip(experts, kept, strict=True):
        down_HI = torch.zeros_like(expert.down_HN)
        down_HI[:, kept_N] = expert.down_HN[:, kept_N]
        masked.append(expert._replace(down_HN=down_HI))

    assert [expert.gate_NH.shape[0] for expert in sliced] == widths_LE[0].tolist()
    y_sliced = reference_moe(x_TH, ids_TK, weights_TK, sliced, silu)
    y_masked = reference_moe(x_TH, ids_TK, weights_TK, masked, silu)
    torch.testing.assert_close(y_sliced, y_masked, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(y_sliced, reference_moe(x_TH, ids_TK, weights_TK, experts, silu))


def test_removed_expert_has_no_output_and_must_not_be_picked() -> None:
    generator = torch.Generator().manual_seed(2)
    experts = make_experts(generator, bias=False)
    ids_TK, weights_TK = make_routing(generator, experts=E - 1)
    x_TH = torch.randn(T, H, dtype=torch.float64, generator=generator)
    removed = [*experts[:-1], None]
    torch.testing.assert_close(
        reference_moe(x_TH, ids_TK, weights_TK, removed, silu),
        reference_moe(x_TH, ids_TK, weights_TK, experts, silu),
        rtol=0,
        atol=0,
    )
    ids_TK[3, 1] = E - 1
    with pytest.raises(AssertionError, match="1 tokens are routed to removed expert 3"):
        reference_moe(x_TH, ids_TK, weights_TK, removed, silu)
    ids_TK[3, 1] = E
    with pytest.raises(AssertionError):
        reference_moe(x_TH, ids_TK, weights_TK, experts, silu)


def test_reference_rounds_only_the_output() -> None:
    generator = torch.Generator().manual_seed(3)
    experts = [
        ExpertWeights(e.gate_NH.bfloat16(), e.up_NH.bfloat16(), e.down_HN.bfloat16())
        for e in make_experts(generator, bias=False)
    ]
    ids_TK, weights_TK = make_routing(generator)
    x_TH = torch.randn(T, H, generator=generator).bfloat16()
    y_TH = reference_moe(x_TH, ids_TK, weights_TK.float(), experts, silu)
    exact_TH = reference_moe(x_TH.double(), ids_TK, weights_TK.float(), experts, silu)
    assert y_TH.dtype == torch.bfloat16
    assert torch.equal(y_TH, exact_TH.bfloat16())


@given(
    # few different values, so that equal scores are common
    scores=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
def test_kept_channels_are_the_best_in_ascending_order(scores: list[list[int]], data: st.DataObject) -> None:
    widths = [data.draw(st.integers(0, 5)) for _ in scores]
    kept = kept_channels(torch.tensor([scores], dtype=torch.float32), torch.tensor([widths]))
    for row, width, kept_N in zip(scores, widths, kept[0], strict=True):
        best = sorted(range(5), key=lambda channel, row=row: (-row[channel], channel))
        assert kept_N.tolist() == sorted(best[:width])
        assert kept_N.dtype == torch.int64


def test_kept_channels_of_several_layers() -> None:
    scores_LEI = torch.tensor([[[1.0, 3.0, 2.0]], [[5.0, 5.0, 9.0]]])
    kept = kept_channels(scores_LEI, torch.tensor([[2], [2]]))
    assert [[kept_N.tolist() for kept_N in layer] for layer in kept] == [[[1, 2]], [[0, 2]]]
    assert channel_order(scores_LEI).tolist() == [[[1, 2, 0]], [[2, 0, 1]]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_an_error(bad: float) -> None:
    scores_LEI = torch.ones(2, 2, 3)
    scores_LEI[1, 0, 2] = bad
    with pytest.raises(CoverageError, match="layer 1 expert 0"):
        kept_channels(scores_LEI, torch.ones(2, 2, dtype=torch.int64))


def test_prefix_scores() -> None:
    prefix_LEN = prefix_scores(torch.tensor([[[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]]]))
    assert prefix_LEN.tolist() == [[[0.0, 3.0, 5.0, 6.0], [0.0, 0.0, 0.0, 0.0]]]
    assert prefix_LEN.dtype == torch.float64


def test_sort_descending_does_not_modify_its_input() -> None:
    values = torch.tensor([[1.0, 3.0], [0.0, float("inf")], [4.0, 4.0]], dtype=torch.float64)
    before = values.clone()
    assert sort_descending(values).tolist() == [[3.0, 1.0], [float("inf"), 0.0], [4.0, 4.0]]
    assert torch.equal(values, before)
    transposed = sort_descending(values.T)
    assert transposed.tolist() == [[4.0, 1.0, 0.0], [float("inf"), 4.0, 3.0]]
