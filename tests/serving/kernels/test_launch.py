"""The forward pass, compared with the reference in float64."""

import pytest
import torch

from moe_coverage_plugin.core.ragged import reference_moe
from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.serving.kernels import routing
from moe_coverage_plugin.serving.kernels.launch import ragged_experts
from moe_coverage_plugin.serving.kernels.tiles import LaunchPlan, all_plans
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS
from tests.serving.kernels.random_layers import DECODE, NARROW, PLANS, SCHEMES, TILED, TOP_K, RandomLayer, error
from tests.serving.random_experts import RaggedExperts

pytestmark = pytest.mark.slow

both_paths = pytest.mark.parametrize("plan", [DECODE, TILED], ids=["decode", "tiled"])


# kernels read the others like one of these
UNLIKE = ("plain", "group-32", "group-32-zeros", "channel-zeros", "float8")


def schemes_and_plans() -> list[tuple[str, str]]:
    """Every plan for some schemes, and a plan of each path for the others; on a card every plan for all."""
    paths = [[name for name, plan in PLANS.items() if plan.path == path] for path in ("decode", "tiled")]
    pairs = []
    for number, scheme in enumerate(SCHEMES):
        every = torch.cuda.is_available() or scheme in UNLIKE
        pairs += [(scheme, plan) for of in paths for plan in (of if every else [of[number % len(of)]])]
    return pairs


@pytest.mark.parametrize(("scheme", "plan"), schemes_and_plans())
def test_equals_reference(device: torch.device, scheme: str, plan: str) -> None:
    layer = RandomLayer(device, scheme)
    inputs = layer.inputs(2 if PLANS[plan].path == "decode" else 9)
    layer.assert_close(ragged_experts(*inputs, layer.weights, plan=PLANS[plan]), layer.reference(*inputs))


@pytest.mark.parametrize(
    ("dtype", "scheme", "plan"),
    [
        *((torch.float16, scheme, DECODE) for scheme in ("plain", "group-32-zeros")),
        *((torch.float16, scheme, TILED) for scheme in ("plain", "group-32", "float8")),
        *((torch.float32, scheme, DECODE) for scheme in ("plain", "group-32", "float8")),
        *((torch.float32, scheme, TILED) for scheme in ("plain", "group-32-zeros")),
    ],
)
def test_other_dtypes(device: torch.device, scheme: str, dtype: torch.dtype, plan: LaunchPlan) -> None:
    layer = RandomLayer(device, scheme, dtype)
    inputs = layer.inputs(3)
    found = ragged_experts(*inputs, layer.weights, plan=plan)
    assert found.dtype == dtype
    layer.assert_close(found, layer.reference(*inputs))


@pytest.mark.parametrize("tokens", [1, 40])
def test_default_plan(device: torch.device, tokens: int) -> None:
    layer = RandomLayer(device, "group-128" if tokens > 1 else "plain-aligned")
    inputs = layer.inputs(tokens)
    assert error(ragged_experts(*inputs, layer.weights), layer.reference(*inputs)) < layer.bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in the interpreter")
@pytest.mark.parametrize("tokens", [1, 7, 130, 2600])
@pytest.mark.parametrize("scheme", ["plain-aligned", "group-128", "group-64", "group-128-zeros", "float8-aligned"])
def test_plans_of_the_table(device: torch.device, scheme: str, tokens: int) -> None:
    """All plans are correct for all numbers of tokens, including those for which other plans are chosen."""
    layer = RandomLayer(device, scheme)
    inputs = layer.inputs(tokens)
    expected = layer.reference(*inputs)
    for plan in all_plans(layer.weights.bits):
        layer.assert_close(ragged_experts(*inputs, layer.weights, plan=plan), expected)


@both_paths
@pytest.mark.parametrize("scheme", ["plain", "channel", "float8"])
def test_biases(device: torch.device, scheme: str, plan: LaunchPlan) -> None:
    layer = RandomLayer(device, scheme, bias=True)
    inputs = layer.inputs(3)
    layer.assert_close(ragged_experts(*inputs, layer.weights, plan=plan), layer.reference(*inputs))


@both_paths
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device: torch.device, activation: str, plan: LaunchPlan) -> None:
    layer = RandomLayer(device, dtype=torch.float32)
    inputs = layer.inputs(2)
    found = ragged_experts(*inputs, layer.weights, activation, plan=plan)
    assert error(found, layer.reference(*inputs, activation)) < layer.bound


@pytest.mark.parametrize(
    ("scheme", "plan"),
    [
        ("plain", "decode"),
        ("plain", "tiled"),
        ("group-32", "decode"),
        ("group-32", "decode-wide"),
        ("group-32", "tiled-swap"),
        ("float8", "decode"),
        ("float8", "tiled"),
    ],
)
def test_weight_on_input(device: torch.device, scheme: str, plan: str) -> None:
    layer = RandomLayer(device, scheme)
    x_TH, weights_TK, ids_TK = layer.inputs(3)
    if scheme == "float8":
        # with powers of two, the result is the same whether a value is weighted before or after rounding to 8 bits
        weights_TK = torch.exp2(weights_TK.log2().round())
    found = ragged_experts(x_TH, weights_TK, ids_TK, layer.weights, weight_on_input=True, plan=PLANS[plan])
    layer.assert_close(found, layer.reference(x_TH, weights_TK, ids_TK, weight_on_input=True))


@pytest.mark.parametrize(
    ("dtype", "plan"), [(torch.int32, "decode"), (torch.int64, "decode-wide"), (torch.int64, "tiled-swap")]
)
def test_negative_and_removed_experts(device: torch.device, dtype: torch.dtype, plan: str) -> None:
    layer = RandomLayer(device)
    x_TH, weights_TK, _ = layer.inputs(4)
    ids_TK = torch.tensor([[-1, 3], [1, -1], [2, 1], [-1, -1]], dtype=dtype, device=device)
    weights_TK[ids_TK < 0] = torch.nan  # routing weights of padding are undefined
    found = ragged_experts(x_TH, weights_TK, ids_TK, layer.weights, plan=PLANS[plan])
    assert error(found, layer.reference(x_TH, weights_TK, ids_TK)) < layer.bound
    assert not found[1].any()
    assert not found[3].any()


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    # how a number is read does not depend on the scheme
    [
        *(("plain", dtype) for dtype in (torch.int32, torch.int64, torch.uint32)),
        ("group-32", torch.int64),
        ("float8", torch.uint32),
    ],
)
@pytest.mark.parametrize("plan", ["decode", "tiled-swap", "tiled-three-kernels"])
def test_numbers_that_no_expert_has(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, scheme: str, plan: str, dtype: torch.dtype
) -> None:
    """They add nothing, and nothing beyond the table is read for them: it holds numbers that lead to NaN or far away.

    In 64 bits, the lower half of a number may be an expert's.
    """
    if plan == "tiled-three-kernels":
        monkeypatch.setattr(routing, "ONE_KERNEL_LIMITS", ())
    layer = RandomLayer(device, scheme, bias=scheme == "plain")
    experts = len(layer.experts.widths)
    x_TH, weights_TK, _ = layer.inputs(5)
    largest = torch.iinfo(dtype).max
    unknown = [experts, experts + 1, largest, 2**32 + 2 if dtype == torch.int64 else largest - 1]
    ids_TK = torch.tensor([[unknown[0], 2], *([2, each] for each in unknown[1:]), [experts, largest]], device=device)
    weights_TK[ids_TK >= experts] = torch.nan
    found = ragged_experts(
        x_TH, weights_TK, ids_TK.to(dtype), layer.weights, plan=PLANS[plan.removesuffix("-three-kernels")]
    )
    layer.assert_close(found, layer.reference(x_TH, weights_TK, ids_TK))
    assert not found[4].any()


@both_paths
def test_all_slots_have_the_same_expert(device: torch.device, plan: LaunchPlan) -> None:
    layer = RandomLayer(device, "group-32")
    x_TH, weights_TK, _ = layer.inputs(9)
    ids_TK = torch.full((9, TOP_K), 2, dtype=torch.int32, device=device)
    found = ragged_experts(x_TH, weights_TK, ids_TK, layer.weights, plan=plan)
    assert error(found, layer.reference(x_TH, weights_TK, ids_TK)) < layer.bound


@pytest.mark.parametrize("plan", [DECODE, TILED, NARROW], ids=["decode", "tiled", "narrow"])
@pytest.mark.parametrize("scheme", ["plain", "group-32-zeros", "channel-zeros"])
def test_outputs_of_ranks_sum_to_the_output(device: torch.device, scheme: str, plan: LaunchPlan) -> None:
    # an expert of a single unit is on one of two ranks, but the other rank may have to add the expert's bias
    single = RandomLayer(device, scheme, torch.float32, bias=True)
    ranks = [RandomLayer(device, scheme, experts=single.experts, rank=rank, world_size=2) for rank in range(2)]
    x_TH, weights_TK, ids_TK = single.inputs(3)
    found = sum(ragged_experts(x_TH, weights_TK, ids_TK, layer.weights, plan=plan).cpu() for layer in ranks)
    assert error(found, single.reference(x_TH, weights_TK, ids_TK)) < single.bound


@both_paths
@pytest.mark.parametrize("bias", [False, True])
def test_a_rank_without_channels(device: torch.device, bias: bool, plan: LaunchPlan) -> None:
    experts = RaggedExperts([1, 1], 64, dtype=torch.float32, bias=bias)
    ranks = [RandomLayer(device, experts=experts, rank=rank, world_size=3) for rank in range(3)]
    assert [layer.weights.max_width for layer in ranks] == [1, 1, 0]
    inputs = ranks[0].inputs(2)
    found = sum(ragged_experts(*inputs, layer.weights, plan=plan).cpu() for layer in ranks)
    assert error(found, ranks[0].reference(*inputs)) < ranks[0].bound


@both_paths
def test_a_rank_without_channels_and_zero_points(device: torch.device, plan: LaunchPlan) -> None:
    experts = RaggedExperts([8, 8], 64, ExpertScheme(4, None, zero_points=True), torch.float32)
    ranks = [RandomLayer(device, experts=experts, rank=rank, world_size=3) for rank in range(3)]
    assert 0 in [layer.weights.max_width for layer in ranks]
    inputs = ranks[0].inputs(2)
    found = sum(ragged_experts(*inputs, layer.weights, plan=plan).cpu() for layer in ranks)
    assert error(found, ranks[0].reference(*inputs)) < ranks[0].bound


@both_paths
def test_ranks_of_8_bits(device: torch.device, plan: LaunchPlan) -> None:
    """Ranks are compared separately because each computes scales from its own channels; one expert is on one rank."""
    experts = RaggedExperts([1, 0, 200], 96, ExpertScheme(8), bias=True)
    for rank in range(2):
        layer = RandomLayer(device, experts=experts, rank=rank, world_size=2)
        x_TH, weights_TK, ids_TK = layer.inputs(3)
        held = experts.of_rank(experts.storage(rank, 2)[0])
        routing = ids_TK.cpu().long(), weights_TK.cpu()
        expected = reference_moe(x_TH.cpu().double(), *routing, held, ACTIVATIONS["silu"], experts.rounded)
        layer.assert_close(ragged_experts(x_TH, weights_TK, ids_TK, layer.weights, plan=plan), expected)


@both_paths
def test_padding_of_rows_is_multiplied_by_zeros(device: torch.device, plan: LaunchPlan) -> None:
    layer = RandomLayer(device)
    inputs = layer.inputs(3)
    expected = ragged_experts(*inputs, layer.weights, plan=plan)
    padded_E = [-(-width // 8) * 8 for width in layer.experts.widths]
    hidden = layer.experts.hidden
    matrices = layer.weights.tensors.w2.split([hidden * padded for padded in padded_E])
    for matrix, width, padded in zip(matrices, layer.experts.widths, padded_E, strict=True):
        matrix.view(hidden, padded)[:, width:] = 1e4
    assert torch.equal(ragged_experts(*inputs, layer.weights, plan=plan), expected)


def test_no_tokens(device: torch.device) -> None:
    layer = RandomLayer(device)
    assert ragged_experts(*layer.inputs(0), layer.weights).shape == (0, layer.experts.hidden)


@pytest.mark.parametrize("tokens", [17, 33])
@pytest.mark.parametrize("plan", ["tiled-swap", "tiled", "tiled-narrow"])
def test_several_tiles_of_an_expert(device: torch.device, tokens: int, plan: str) -> None:
    layer = RandomLayer(device)
    inputs = layer.inputs(tokens)
    assert error(ragged_experts(*inputs, layer.weights, plan=PLANS[plan]), layer.reference(*inputs)) < layer.bound


@pytest.mark.parametrize("plan", ["decode", "decode-wide", "tiled-swap", "tiled"])
def test_results_are_bit_identical_between_runs(device: torch.device, plan: str) -> None:
    layer = RandomLayer(device)
    inputs = layer.inputs(3)
    first, second = (ragged_experts(*inputs, layer.weights, plan=PLANS[plan]) for _ in range(2))
    assert torch.equal(first, second)


def test_non_contiguous_inputs(device: torch.device) -> None:
    layer = RandomLayer(device)
    x_TH, weights_TK, ids_TK = layer.inputs(3)
    views = torch.stack([x_TH, x_TH], dim=-1)[..., 0], weights_TK.t().contiguous().t(), ids_TK.t().contiguous().t()
    found, expected = (
        ragged_experts(*inputs, layer.weights, plan=DECODE) for inputs in (views, (x_TH, weights_TK, ids_TK))
    )
    assert torch.equal(found, expected)
