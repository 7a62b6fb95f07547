import pytest
import torch

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving.storage import DOWN, GATE, UP, ExpertStorage
from tests.serving.random_experts import PROJECTIONS, RaggedExperts

SCHEMES = [
    ExpertScheme(),
    ExpertScheme(4, 32),
    ExpertScheme(4, None),
    ExpertScheme(4, 32, zero_points=True),
    ExpertScheme(4, None, zero_points=True),
    ExpertScheme(8),
]
WIDTHS = [64, 0, 32, 128, 96]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_take_the_stored_bytes(scheme: ExpertScheme, bias: bool) -> None:
    experts = RaggedExperts(WIDTHS, scheme=scheme, bias=bias)
    _, layer = experts.storage()
    found = sum(parameter.nbytes for parameter in layer.parameters())
    stored = sum(t.nbytes for (tensor, _, _), t in experts.tensors.items() if tensor != "weight_shape")
    removed_down_biases = WIDTHS.count(0) * experts.hidden * experts.dtype.itemsize if bias else 0
    assert found == stored + removed_down_biases


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_share_the_stored_bytes(scheme: ExpertScheme, world_size: int) -> None:
    experts = RaggedExperts(WIDTHS, scheme=scheme)
    layers = [experts.storage(rank, world_size)[1] for rank in range(world_size)]
    found = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    stored = sum(t.nbytes for (tensor, _, _), t in experts.tensors.items() if tensor != "weight_shape")
    repeated = 0  # scales and zero points of whole rows are needed on every rank that holds a part of the expert
    if scheme.bits != 16 and scheme.group_size is None:
        storages = [experts.storage(rank, world_size)[0] for rank in range(world_size)]
        holders = sum(width > 0 for storage in storages for width in storage.local.widths_E)
        bytes_of_row = experts.dtype.itemsize + (0.5 if scheme.zero_points else 0)
        repeated = (holders - sum(width > 0 for width in WIDTHS)) * experts.hidden * bytes_of_row
    assert found == stored + repeated


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_with_entire_experts_take_the_stored_bytes(scheme: ExpertScheme) -> None:
    """No scale is repeated, and a rank without experts takes nothing."""
    experts = RaggedExperts(WIDTHS, scheme=scheme)
    experts.holders = [0, 2, 2, 0, 2]
    for rank in range(3):
        _, layer = experts.loaded(rank, 3)
        stored = sum(
            tensor.nbytes
            for (kind, _, expert), tensor in experts.tensors.items()
            if kind != "weight_shape" and experts.holders[expert] == rank
        )
        assert sum(parameter.nbytes for parameter in layer.parameters()) == stored
    storage, layer = experts.storage(0, 3)
    experts.load(layer, [key for key in experts.tensors if key[2] != 3])
    with pytest.raises(CoverageError, match=r"experts\.3\.gate_proj"):
        storage.check_complete()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_complete_load_leaves_no_nan(scheme: ExpertScheme) -> None:
    experts = RaggedExperts(WIDTHS, scheme=scheme)
    storage, layer = experts.storage()
    experts.load(layer)
    storage.check_complete()
    assert not any(parameter.isnan().any() for parameter in layer.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_missing_tensor_is_named(scheme: ExpertScheme) -> None:
    """Case 23: every tensor of the experts must be loaded, or the engine stops."""
    experts = RaggedExperts([32, 0, 64], scheme=scheme)
    for missing in experts.tensors:
        storage, layer = experts.storage()
        experts.load(layer, [key for key in experts.tensors if key != missing])
        tensor, shard, expert = missing
        with pytest.raises(
            CoverageError, match=rf"1 of \d+ .*mlp\.experts\.{expert}\.{PROJECTIONS[shard]}\.{tensor}\)"
        ):
            storage.check_complete()


def test_long_lists_of_missing_tensors_are_cut() -> None:
    storage, _ = RaggedExperts([32, 64, 64]).storage()
    with pytest.raises(CoverageError, match=r"9 of 9 .*experts\.0\.gate_proj\.weight, .* and 5 more"):
        storage.check_complete()


def test_tensor_that_is_loaded_twice() -> None:
    experts = RaggedExperts([32, 64])
    _, layer = experts.storage()
    experts.load(layer)
    with pytest.raises(CoverageError, match=r"mlp\.experts\.1\.up_proj\.weight is in the checkpoint more than once"):
        experts.load(layer, [("weight", UP, 1)])


def test_weights_in_another_layout_cannot_be_loaded_again() -> None:
    experts = RaggedExperts([32, 64])
    storage, layer = experts.storage()
    experts.load(layer)
    other = torch.ones(3, dtype=torch.uint8)
    storage.replace_parameter(layer, "w2_weight", other)
    assert dict(layer.named_parameters())["w2_weight"].data_ptr() == other.data_ptr()
    with pytest.raises(CoverageError, match="were rearranged for the kernels and cannot be loaded again"):
        experts.load(layer, [("weight", DOWN, 0)])


@pytest.mark.parametrize(
    ("key", "shape"),
    [(("weight", GATE, 0), (64, 64)), (("weight", DOWN, 0), (64, 31)), (("weight", UP, 1), (0, 64))],
)
def test_wrong_shape_names_tensor_expected_and_found(key: tuple[str, str, int], shape: tuple[int, int]) -> None:
    experts = RaggedExperts([32, 96])
    expected = list(experts.tensors[key].shape)
    experts.tensors[key] = torch.zeros(shape)
    _, layer = experts.storage()
    name = rf"mlp\.experts\.{key[2]}\.{PROJECTIONS[key[1]]}\.weight"
    message = rf"{name} has shape \[{shape[0]}, {shape[1]}\], expected \[{expected[0]}, {expected[1]}\]"
    with pytest.raises(CoverageError, match=message):
        experts.load(layer, [key])


def test_tensor_of_removed_expert() -> None:
    experts = RaggedExperts([32, 96])
    _, layer = RaggedExperts([32, 0]).storage()
    with pytest.raises(CoverageError, match=r"experts\.1\.gate_proj\.weight has shape .* at width 0"):
        experts.load(layer, [("weight", GATE, 1)])


def test_declared_shape_that_is_not_the_width() -> None:
    experts = RaggedExperts([32, 64], scheme=ExpertScheme(4, 32))
    experts.tensors["weight_shape", DOWN, 1] = torch.tensor([64, 128])
    _, layer = experts.storage()
    with pytest.raises(CoverageError, match=r"1\.down_proj\.weight_shape has shape \[64, 128\], expected \[64, 64\]"):
        experts.load(layer, [("weight_shape", DOWN, 1)])


def test_hidden_size_that_cuts_a_group() -> None:
    with pytest.raises(
        CoverageError, match="hidden size 96, which is not a multiple of the quantization group size 64"
    ):
        ExpertStorage("mlp.experts", tuple(PROJECTIONS.values()), [64], 96, ExpertScheme(4, 64))


def test_weights_may_be_loaded_again() -> None:
    experts = RaggedExperts([32, 64])
    storage, layer = experts.storage()
    for _ in range(2):
        experts.load(layer)
        storage.check_complete()
