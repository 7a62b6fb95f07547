"""Score files are read bit for bit, and any damaged file stops with a clear error."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import CoverageOptions
from tests.files.forged import Change, forge, to_version_1

PROVENANCE = {"model": "a/b", "calibration_batches": 4, "versions": {"torch": "2"}, "recipe": [{"ignore": []}]}
OPTIONAL = ("layer_loss_L", "nll_signed_LE", "nll_absolute_LE", "nll_squared_LE")


def random_scores(layers: int = 2, experts: int = 3, channels: int = 4, measured: tuple[str, ...] = OPTIONAL) -> Any:
    generator = torch.Generator().manual_seed(layers + 7 * experts + 31 * channels)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {"layer_loss_L": (layers,)}
    return AttributionScores(
        names=[f"model.layers.{layer}.mlp.experts" for layer in range(layers)],
        top_k=[1 + layer % experts for layer in range(layers)],
        channel_metric="fisher",
        channels_LEI=draw(layers, experts, channels).square(),
        first_order_LE=draw(layers, experts),
        second_order_LE=draw(layers, experts),
        tokens_LE=torch.randint(0, 2**40, (layers, experts), generator=generator),
        routing_weight_sum_LE=draw(layers, experts),
        **{name: draw(*shapes.get(name, (layers, experts))) for name in measured},
    )


def assert_same(found: AttributionScores, expected: AttributionScores) -> None:
    for field in fields(AttributionScores):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name


@pytest.fixture(scope="module")
def real_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A score file, to be damaged."""
    path = tmp_path_factory.mktemp("scores") / "scores.safetensors"
    save_scores(path, random_scores(), PROVENANCE)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(CoverageError) as caught:
        load_scores(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.sets(st.sampled_from(OPTIONAL)))
def test_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, layers: int, experts: int, channels: int, measured: set[str]
) -> None:
    scores = random_scores(layers, experts, channels, tuple(sorted(measured)))
    path = tmp_path_factory.mktemp("round") / "missing" / "scores.safetensors"
    save_scores(path, scores, PROVENANCE)
    found, provenance = load_scores(path)
    assert_same(found, scores)
    assert provenance == PROVENANCE
    assert [file.name for file in path.parent.iterdir()] == ["scores.safetensors"]


def test_plans_from_the_file_equal_those_of_the_run(tmp_path: Path) -> None:
    scores = random_scores(3, 8, 32)
    save_scores(tmp_path / "scores.safetensors", scores, {})
    found, _ = load_scores(tmp_path / "scores.safetensors")
    on_two_levels = CoverageOptions(sparsity=0.4, scope="layers", intra_layer="coverage")
    for options, importance in (
        (on_two_levels, "first_order"),
        (on_two_levels, "nll_squared"),
        (CoverageOptions(sparsity=0.4), "first_order"),
    ):
        plans = plan_widths(found, options, importance), plan_widths(scores, options, importance)
        assert all(map(torch.equal, *plans))


def test_any_tensor_is_stored_in_full(tmp_path: Path) -> None:
    square_EI = torch.rand(3, 3).T
    assert not square_EI.is_contiguous()
    shared_LE = torch.rand(1, 3)
    scores = AttributionScores(
        ["layer"], [1], "weight", square_EI[None], shared_LE, shared_LE, shared_LE.round().int(), shared_LE
    )
    save_scores(tmp_path / "scores.safetensors", scores, {})
    found, _ = load_scores(tmp_path / "scores.safetensors")
    assert torch.equal(found.channels_LEI, scores.channels_LEI.double())
    assert torch.equal(found.tokens_LE, scores.tokens_LE.long())
    assert torch.equal(found.routing_weight_sum_LE, shared_LE.double())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_unusable_scores_are_not_written(tmp_path: Path, value: float) -> None:
    scores = random_scores()
    scores.channels_LEI[1, 2, 3] = value
    with pytest.raises(CoverageError, match="layer 1 expert 2"):
        save_scores(tmp_path / "scores.safetensors", scores, {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken" / "scores.safetensors").mkdir(parents=True)
    with pytest.raises(CoverageError, match="cannot be written"):
        save_scores(tmp_path / "taken" / "scores.safetensors", random_scores(), {})
    assert [file.name for file in (tmp_path / "taken").iterdir()] == ["scores.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(CoverageError, match="cannot be written"):
        save_scores(tmp_path / "file" / "scores.safetensors", random_scores(), {})


@given(st.data())
def test_any_change_is_noticed(real_file: Path, data: st.DataObject) -> None:
    original = real_file.read_bytes()
    place = data.draw(st.integers(0, len(original)))
    kind = data.draw(st.sampled_from(["flip", "truncate", "insert", "delete", "swap"]))
    rest = original[place:]
    match kind:
        case "flip":
            changed = original[:place] + bytes(byte ^ data.draw(st.integers(1, 255)) for byte in rest[:1]) + rest[1:]
        case "truncate":
            changed = original[:place]
        case "insert":
            changed = original[:place] + data.draw(st.binary(min_size=1, max_size=16)) + rest
        case "delete":
            changed = original[:place] + rest[data.draw(st.integers(1, 64)) :]
        case _:
            changed = rest + original[:place]
    copy = real_file.with_name("changed.bin")
    copy.write_bytes(changed)
    if changed == original:
        assert_same(load_scores(copy)[0], random_scores())
    else:
        error_of(copy)


def test_every_single_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    save_scores(path, random_scores(1, 1, 1, ()), {})
    original = bytearray(path.read_bytes())
    for place, byte in enumerate(original):
        # JSON also allows other white space instead of the spaces that pad a header
        original[place] = ord("\t") if byte == ord(" ") else byte ^ 0x01
        path.write_bytes(original)
        original[place] = byte
        error_of(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    JSON | st.fixed_dictionaries({"__metadata__": JSON, "channels_LEI": JSON}), st.none() | st.integers(0, 2**64 - 1)
)
def test_adversarial_headers(real_file: Path, header: Any, length: int | None) -> None:
    text = json.dumps(header).encode()
    path = real_file.with_name("header.bin")
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(64))
    error_of(path)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(real_file: Path, data: bytes) -> None:
    path = real_file.with_name("bytes.bin")
    path.write_bytes(data)
    error_of(path)


def test_files_of_the_first_release_are_read() -> None:
    """The file was written by the first release, which called one tensor ``gate_sum_LE``."""
    scores, provenance = load_scores(Path(__file__).parents[1] / "data" / "moe_coverage_scores.bin")
    row_E = torch.arange(3, dtype=torch.float64)
    expected = AttributionScores(
        names=["model.layers.1.mlp.experts"],
        top_k=[2],
        channel_metric="fisher",
        channels_LEI=torch.arange(6, dtype=torch.float64).reshape(1, 3, 2),
        first_order_LE=10 + row_E[None],
        second_order_LE=20 + row_E[None],
        tokens_LE=30 + row_E[None].long(),
        routing_weight_sum_LE=40 + row_E[None],
        layer_loss_L=torch.tensor([50.0], dtype=torch.float64),
        nll_signed_LE=-60 - row_E[None],
        nll_absolute_LE=70 + row_E[None],
        nll_squared_LE=80 + row_E[None],
    )
    assert_same(scores, expected)
    assert provenance == {"model": "a/b", "calibration_batches": 4}


def test_a_forged_file_without_damage_is_read(real_file: Path, tmp_path: Path) -> None:
    forge(tmp_path / "forged.bin", real_file, lambda *_: None)
    assert_same(load_scores(tmp_path / "forged.bin")[0], random_scores())


FORGERIES: dict[str, tuple[Change, str]] = {
    "other version": (lambda _, metadata: metadata.update(schema_version="3"), "has schema version '3'"),
    "no version": (lambda _, metadata: metadata.pop("schema_version"), "has schema version None"),
    "foreign": (lambda _, metadata: metadata.clear(), "holds no scores"),
    "no checksum": (lambda _, metadata: metadata.pop("sha256"), "has no checksum"),
    "empty checksum": (lambda _, metadata: metadata.update(sha256=""), "has no checksum"),
    "names no JSON": (lambda _, metadata: metadata.update(names="[1"), "names that are not JSON"),
    "names of numbers": (lambda _, metadata: metadata.update(names="[1, 2]"), "does not name its layers"),
    "names twice": (lambda _, metadata: metadata.update(names='["a", "a"]'), "does not name its layers"),
    "names of no list": (lambda _, metadata: metadata.update(names='{"a": 1}'), "names of the wrong type"),
    "no names": (lambda _, metadata: metadata.update(names="[]"), "does not name its layers"),
    "a name too many": (lambda _, metadata: metadata.update(names='["a", "b", "c"]'), "for 3 layers"),
    "top-k above experts": (lambda _, metadata: metadata.update(top_k="[1, 4]"), "how many of 3 experts"),
    "top-k of booleans": (lambda _, metadata: metadata.update(top_k="[true, 1]"), "how many of 3 experts"),
    "top-k too short": (lambda _, metadata: metadata.update(top_k="[1]"), "how many of 3 experts"),
    "other metric": (lambda _, metadata: metadata.update(channel_metric="magic"), "channel metric 'magic'"),
    "no metric": (lambda _, metadata: metadata.pop("channel_metric"), "channel metric None"),
    "provenance a list": (lambda _, metadata: metadata.update(provenance="[]"), "provenance of the wrong type"),
    "no provenance": (lambda _, metadata: metadata.pop("provenance"), "provenance of the wrong type"),
    "provenance endless": (
        lambda _, metadata: metadata.update(provenance="[" * 200_000),
        "provenance that are not JSON",
    ),
    "version 1 with a name of version 2": (
        lambda _, metadata: metadata.update(schema_version="1"),
        "(gate_sum_LE, routing_weight_sum_LE)",
    ),
    "version 2 with a name of version 1": (
        lambda tensors, metadata: (to_version_1(tensors, metadata), metadata.update(schema_version="2")),
        "(gate_sum_LE, routing_weight_sum_LE)",
    ),
    "missing tensor": (lambda tensors, _: tensors.pop("tokens_LE"), "tokens_LE"),
    "extra tensor": (lambda tensors, _: tensors.update(extra=torch.ones(1)), "extra"),
    "float tokens": (lambda tensors, _: tensors.update(tokens_LE=tensors["tokens_LE"].double()), "tokens_LE as F64"),
    "half scores": (lambda tensors, _: tensors.update(channels_LEI=tensors["channels_LEI"].half()), "as F16"),
    "odd dtype": (
        lambda tensors, _: tensors.update(routing_weight_sum_LE=torch.ones(2, 3).to(torch.float8_e5m2)),
        "as F8_E5M2",
    ),
    "other experts": (lambda tensors, _: tensors.update(tokens_LE=tensors["tokens_LE"][:, :2].clone()), "[2, 2]"),
    "loss of experts": (
        lambda tensors, _: tensors.update(layer_loss_L=tensors["routing_weight_sum_LE"].clone()),
        "layer_loss_L",
    ),
    "flat scores": (lambda tensors, _: tensors.update(channels_LEI=tensors["channels_LEI"].flatten()), "[24]"),
    "no experts": (lambda tensors, _: tensors.update(channels_LEI=torch.ones(2, 0, 4).double()), "[2, 0, 4]"),
    "NaN": (lambda tensors, _: tensors["channels_LEI"][0, 1, 2].fill_(torch.nan), "layer 0 expert 1 has nan"),
    "infinite": (lambda tensors, _: tensors["channels_LEI"][0, 1, 2].fill_(torch.inf), "layer 0 expert 1 has inf"),
    "negative": (lambda tensors, _: tensors["channels_LEI"][1, 0, 2].fill_(-1e-9), "layer 1 expert 0 has -1e-09"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries(real_file: Path, tmp_path: Path, name: str) -> None:
    change, expected = FORGERIES[name]
    path = tmp_path / "forged.bin"
    forge(path, real_file, change)
    message = error_of(path)
    assert expected in message
    assert "checksum" not in message or "checksum" in expected


def test_files_of_other_kinds(real_file: Path, tmp_path: Path) -> None:
    assert "there is no score file" in error_of(tmp_path / "absent.bin")
    assert "there is no score file" in error_of(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(save({"weight": torch.ones(2, 2)}))
    assert "holds no scores" in error_of(tmp_path / "weights.safetensors")
    torch.save({"channels_LEI": torch.ones(1, 1, 1)}, tmp_path / "pickle.bin")
    assert "cannot be read" in error_of(tmp_path / "pickle.bin")
    (tmp_path / "short.bin").write_bytes(real_file.read_bytes()[:-1])
    assert "cannot be read" in error_of(tmp_path / "short.bin")


def test_scores_of_a_users_own_rule(tmp_path: Path) -> None:
    own = replace(random_scores(), channels_LEI=torch.ones(2, 3, 4), channel_metric="own")
    save_scores(tmp_path / "own.bin", own, PROVENANCE)
    found, _ = load_scores(tmp_path / "own.bin")
    assert found.channel_metric == "own"
    assert torch.equal(found.channels_LEI, torch.ones(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("channels_LEI", (2, 4, 4)),
        ("channels_LEI", (1, 3, 4)),
        ("channels_LEI", (2, 3)),
        ("channels_LEI", (2, 3, 4, 1)),
        ("channels_LEI", (2, 3, 0)),
        ("first_order_LE", (2, 4)),
        ("layer_loss_L", (3,)),
    ],
)
def test_tensors_of_different_shapes_are_not_saved(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CoverageError, match=rf"{name} has shape .*, 2 layers of 3 experts need \[2"):
        save_scores(tmp_path / "own.bin", replace(random_scores(), **{name: torch.zeros(shape)}), PROVENANCE)
    assert not list(tmp_path.iterdir())
