import pytest
import torch

from moe_coverage_plugin.core.ragged import reference_moe
from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS, ragged_moe, ragged_moe_operator, routed_experts
from moe_coverage_plugin.serving.storage import ExpertStorage
from tests.serving.random_experts import RaggedExperts

TOP_K = 2
UGLY = [37, 0, 1, 128, 5, 64, 0, 99]  # removed, one channel, the full width, and odd widths
BLOCKS = [32, 0, 64, 128, 96, 32, 0, 64]
SCHEMES = [
    (ExpertScheme(), UGLY),
    (ExpertScheme(4, 32), BLOCKS),
    (ExpertScheme(4, None), [40, 0, 8, 128, 24, 64, 0, 96]),
    (ExpertScheme(4, 32, zero_points=True), BLOCKS),
    (ExpertScheme(4, None, zero_points=True), [40, 0, 9, 128, 24, 64, 0, 97]),
    (ExpertScheme(8), UGLY),
]


def route(widths: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights and expert numbers of random tokens; removed experts are never chosen."""
    logits = torch.randn(tokens, len(widths)).masked_fill(torch.tensor(widths) == 0, -torch.inf)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights, ids.to(torch.int32)


def forward(
    experts: RaggedExperts,
    storage: ExpertStorage,
    layer: torch.nn.Module,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str = "silu",
    weight_on_input: bool = False,
) -> torch.Tensor:
    return ragged_moe(
        x,
        weights,
        ids,
        storage.parameters(layer),
        widths_E=list(storage.local.widths_E),
        group_size=experts.scheme.group_size or 0,
        activation=activation,
        weight_on_input=weight_on_input,
    )


def reference(experts: RaggedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return reference_moe(x, ids, weights, experts.weights, torch.nn.functional.silu, experts.rounded)


def assert_equal(experts: RaggedExperts, found: torch.Tensor, expected: torch.Tensor) -> None:
    if experts.scheme.bits != 8:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return
    # an activation in the middle of two 8-bit floats may be rounded to either, which differ by at most an eighth
    difference, norm = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    assert (difference <= norm / 8).all()
    assert (difference <= 1e-5 * norm).float().mean() > 0.9


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_equals_reference(scheme: ExpertScheme, widths: list[int], tokens: int, bias: bool) -> None:
    """Case 16, case 27: loaded experts, with biases and without, compute one token and many correctly."""
    experts = RaggedExperts(widths, scheme=scheme, bias=bias)
    x, (weights, ids) = torch.randn(tokens, experts.hidden), route(widths, tokens)
    found = forward(experts, *experts.loaded(), x, weights, ids)
    assert_equal(experts, found, reference(experts, x, weights, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    experts = RaggedExperts(UGLY, dtype=dtype)
    x, (weights, ids) = torch.randn(64, experts.hidden).to(dtype), route(UGLY, 64)
    found, expected = forward(experts, *experts.loaded(), x, weights, ids), reference(experts, x, weights, ids)
    assert found.dtype == dtype
    # values up to the largest output are rounded to dtype three times between input and output
    scale = 3 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=scale)


@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
def test_all_tokens_to_the_same_experts(scheme: ExpertScheme, widths: list[int]) -> None:
    experts = RaggedExperts(widths, scheme=scheme)
    x, (weights, _) = torch.randn(17, experts.hidden), route(widths, 17)
    ids = torch.tensor([[2, 3]]).expand(17, TOP_K)
    found = forward(experts, *experts.loaded(), x, weights, ids)
    assert_equal(experts, found, reference(experts, x, weights, ids))


def test_no_tokens() -> None:
    experts = RaggedExperts(UGLY)
    x, (weights, ids) = torch.randn(0, experts.hidden), route(UGLY, 0)
    assert forward(experts, *experts.loaded(), x, weights, ids).shape == (0, experts.hidden)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
def test_outputs_of_ranks_add_up(scheme: ExpertScheme, widths: list[int], world_size: int, bias: bool) -> None:
    experts = RaggedExperts(widths, scheme=scheme, bias=bias)
    x, (weights, ids) = torch.randn(32, experts.hidden), route(widths, 32)
    parts = [forward(experts, *experts.loaded(rank, world_size), x, weights, ids) for rank in range(world_size)]
    if scheme.bits != 8:
        assert_equal(experts, sum(parts), reference(experts, x, weights, ids))
        return
    # a token has a scale on each rank, from the channels that the rank holds
    for rank, part in enumerate(parts):
        held = experts.of_rank(experts.storage(rank, world_size)[0])
        expected = reference_moe(x, ids, weights, held, torch.nn.functional.silu, experts.rounded)
        assert_equal(experts, part, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
def test_outputs_of_ranks_with_entire_experts_add_up(scheme: ExpertScheme, widths: list[int], bias: bool) -> None:
    """Experts keep their numbers; one rank holds none. Scales of activations are those of one rank, in 8 bits, too."""
    experts = RaggedExperts(widths, scheme=scheme, bias=bias)
    experts.holders = [expert % 2 for expert in range(len(widths))]
    x, (weights, ids) = torch.randn(32, experts.hidden), route(widths, 32)
    parts = [forward(experts, *experts.loaded(rank, 3), x, weights, ids) for rank in range(3)]
    assert not parts[2].any()
    assert_equal(experts, sum(parts), reference(experts, x, weights, ids))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("width", [768, 640, 896])
def test_shares_that_would_end_within_a_group(width: int, group_size: int, world_size: int) -> None:
    """Case 3, case 6: scales belong to the channels that a rank holds, which is checked by the output.

    Case 1, case 2: 192 or 320 channels for each rank would cut a group of 128; case 8: 64 is as good as 128.
    """
    widths = [width, 0, 128, 256]
    experts = RaggedExperts(widths, hidden=256, scheme=ExpertScheme(4, group_size))
    x, (weights, ids) = torch.randn(9, experts.hidden), route(widths, 9)
    parts = [forward(experts, *experts.loaded(rank, world_size), x, weights, ids) for rank in range(world_size)]
    torch.testing.assert_close(sum(parts), reference(experts, x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
def test_same_sum_while_the_routing_is_unknown(
    scheme: ExpertScheme, widths: list[int], bias: bool, weight_on_input: bool
) -> None:
    experts = RaggedExperts(widths, scheme=scheme, bias=bias)
    storage, layer = experts.loaded()
    x, (weights, ids) = torch.randn(16, experts.hidden), route(widths, 16)
    x[3] = 1e30  # experts that this token is not routed to overflow
    arguments = (
        x,
        weights[:, :1],
        ids[:, :1],
        storage.parameters(layer),
        storage.local,
        ACTIVATIONS["silu"],
    )
    known, unknown = (routed_experts(*arguments, weight_on_input, routing_known) for routing_known in (True, False))
    torch.testing.assert_close(unknown, known, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert unknown[:3].isfinite().all()


@pytest.mark.parametrize("routing_known", [True, False])
@pytest.mark.parametrize("number", [-1, len(UGLY), 2**31 - 1])
def test_numbers_that_no_expert_has_add_nothing(number: int, routing_known: bool) -> None:
    """Like vLLM's mark of padding, whose routing weights are undefined."""
    experts = RaggedExperts(UGLY)
    x, (weights, ids) = torch.randn(8, experts.hidden), route(UGLY, 8)
    expected = reference(experts, x[:5], weights[:5], ids[:5])
    one_slot = reference(experts, x[5:6], weights[5:6, :1], ids[5:6, :1])
    ids[5, 1:], weights[5, 1:] = number, torch.nan
    ids[6:], weights[6:] = number, torch.nan
    storage, layer = experts.loaded()
    options = storage.parameters(layer), storage.local, ACTIVATIONS["silu"], False, routing_known
    found = routed_experts(x, weights, ids, *options)
    torch.testing.assert_close(found[:6], torch.cat([expected, one_slot]), rtol=1e-5, atol=1e-5)
    assert not found[6:].any()


def test_weight_on_input() -> None:
    """Case 18: some models multiply the routing weight into the input of an expert."""
    experts = RaggedExperts(UGLY)
    x, (weights, ids) = torch.randn(16, experts.hidden), route(UGLY, 16)
    weights, ids = weights[:, :1], ids[:, :1]
    found = forward(experts, *experts.loaded(), x, weights, ids, weight_on_input=True)
    expected = reference(experts, x * weights, torch.ones_like(weights), ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    experts = RaggedExperts(UGLY)
    x, (weights, ids) = torch.randn(16, experts.hidden), route(UGLY, 16)
    found = forward(experts, *experts.loaded(), x, weights, ids, activation)
    expected = reference_moe(x, ids, weights, experts.weights, ACTIVATIONS[activation])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scheme", "widths"), SCHEMES)
def test_operator_is_well_formed(scheme: ExpertScheme, widths: list[int]) -> None:
    experts = RaggedExperts(widths, scheme=scheme)
    storage, layer = experts.loaded()
    weights, ids = route(widths, 4)
    arguments = (
        torch.randn(4, experts.hidden),
        weights,
        ids,
        *storage.parameters(layer),
        list(storage.local.widths_E),
        scheme.group_size or 0,
        "silu",
        False,
    )
    # test_schema multiplies its inputs by zero, which torch does not support for 8-bit floats
    of_any = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        ragged_moe_operator, arguments, test_utils=of_any if scheme.bits == 8 else ("test_schema", *of_any)
    )
