"""How often a pass loads offloaded weights, and that it computes the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload import OffloadCache
from compressed_tensors.offload.cache import DiskCache
from torch import Tensor

from moe_coverage_plugin.calibration import layerwise_gradients
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling import loaded_layers
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.calibration.brute_force import open_stock, save_float64
from tests.calibration.test_layerwise import AVX2, Reordered
from tests.calibration.test_offload import on_disk
from tests.modifiers.harness import offload_to_disk
from tests.tiny import token_batches

pytestmark = pytest.mark.slow

BATCHES, LAYERS = 5, 3
# one run of the model that finds the order of its layers, and one call of each layer that is compared with it
CHECK = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float64(tmp_path_factory.mktemp("source") / "model", "qwen3_moe", num_hidden_layers=LAYERS)


def batches() -> list[dict[str, Tensor]]:
    """Of one sample each; the third predicts nothing."""
    rows: Any = token_batches(BATCHES, 12)
    found = [{name: torch.tensor(ids)[None] for name, ids in row.items()} for row in rows]
    found[2]["labels"] = torch.full_like(found[2]["input_ids"], -100)
    return found


@contextmanager
def counted_loads(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Loads of a weight of an expert, for each layer."""
    weights = {}
    for index, layer in enumerate(find_moe_layers(model)):
        for mlp in layer.mlps:
            up_proj: Any = mlp.up_proj
            weights[up_proj._parameters.offloaded_values["weight"]] = index
    loads: Counter[Tensor] = Counter()
    onload = DiskCache.onload

    def count(self: DiskCache, offloaded: Any) -> Any:
        if offloaded in weights:
            loads[offloaded] += 1
        return onload(self, offloaded)

    found: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "onload", count)
        yield found
    for index in range(LAYERS):
        (number,) = {loads[weight] for weight, layer in weights.items() if layer == index}
        found.append(number)


def observed(model: Any, metric: Any, data: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The sums of all observers."""
    layers = find_moe_layers(model)
    observers = [LayerObserver(layer, metric, ema=0.5) for layer in layers]
    gradients = [GradientObserver(layer, metric) for layer in layers if metric != "activation"]
    observe_batches(model, data, observers, gradients)
    return [dict(each.sums) for each in (*observers, *gradients)]


def assert_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def limit_states(monkeypatch: pytest.MonkeyPatch, model: Any, batches_of_group: int) -> None:
    """Let host memory hold the inputs of all layers for so many batches of 12 tokens."""
    size = batches_of_group * LAYERS * 12 * model.config.hidden_size * 8
    monkeypatch.setattr(layerwise_gradients, "MOST_STATES", size)


@pytest.mark.parametrize(("batches_of_group", "groups"), [(5, 1), (2, 3), (1, 5)])
@pytest.mark.parametrize("metric", ["obs", "snip"])
def test_gradients_load_each_layer_twice_for_a_group(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, batches_of_group: int, groups: int
):
    """The sums are those of the model in memory, bit for bit; neighbouring visits of a layer share a load."""
    model, data = on_disk(source, tmp_path / "disk"), batches()
    limit_states(monkeypatch, model, batches_of_group)
    with counted_loads(model, monkeypatch) as loads:
        found = observed(model, metric, data)
    assert_equal(found, observed(open_stock(source, linear=True), metric, data))
    assert loads == [CHECK + groups + 1, CHECK + 2 * groups, CHECK + groups]
    assert not OffloadCache.keep_onloaded_values
    assert not OffloadCache.offloading_disabled


def test_a_pass_without_gradients_loads_each_layer_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, data = on_disk(source, tmp_path / "disk"), batches()
    with counted_loads(model, monkeypatch) as loads:
        found = observed(model, "activation", data)
    assert_equal(found, observed(open_stock(source, linear=True), "activation", data))
    assert loads == [CHECK + 1] * LAYERS


def test_layers_that_cannot_be_called_one_by_one(source: Path, tmp_path: Path, log: list[str]):
    """Each batch then loads all layers, and the log says so."""
    models = on_disk(source, tmp_path / "disk"), open_stock(source, linear=True)
    for model in models:
        model.model.layers = Reordered(model.model.layers, lambda layers: [*layers, layers[0]])
    found, expected = (observed(model, "fisher", batches()) for model in models)
    assert_equal(found, expected)
    assert any("Each batch loads all offloaded weights, because" in message for message in log)


@pytest.mark.parametrize("metric", ["obs", "activation"])
def test_a_bfloat16_model_on_a_processor_that_is_slow_in_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
):
    """The sums are those of the model in memory, bit for bit, also with several groups."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2)
    resident, model = (open_stock(source, linear=True).bfloat16() for _ in range(2))
    (tmp_path / "disk").mkdir()
    offload_to_disk(model, tmp_path / "disk")
    limit_states(monkeypatch, model, 1)
    assert_equal(observed(model, metric, batches()), observed(resident, metric, batches()))


def test_host_memory_that_is_too_small_for_a_batch(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layerwise_gradients, "free_host_memory", lambda: 2**10)
    with pytest.raises(CoverageError, match=r"of host memory for a batch, of which .* calibrate on smaller batches"):
        observed(on_disk(source, tmp_path / "disk"), "fisher", batches())


def test_a_pass_layer_by_layer_loads_each_layer_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At most the layer and the next one are loaded, also if the layer computes twice."""
    model, data = on_disk(source, tmp_path / "disk"), batches()
    layers = find_moe_layers(model)
    largest = max(loaded_layers.offloaded_bytes(each) for each in model.model.layers)

    def visit(step: DecoderStep) -> None:
        step.observe(changes=True)
        kept = OffloadCache.keep_onloaded_values
        assert sum(each.nbytes for each in kept.values()) <= largest

    with counted_loads(model, monkeypatch) as loads:
        visit_layers(model, layers, data, visit, "Test")
    assert loads == [CHECK + 1] * LAYERS
    assert not OffloadCache.keep_onloaded_values


@pytest.mark.parametrize(
    ("layers_that_fit", "loads_of_pass", "warning"),
    [(1.0, 1, "so the next layer is not loaded ahead"), (0.9, BATCHES, "so they are read again for every batch")],
)
def test_layers_that_do_not_fit(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
    layers_that_fit: float,
    loads_of_pass: int,
    warning: str,
):
    model, data = on_disk(source, tmp_path / "disk"), batches()
    free = int(layers_that_fit / loaded_layers.SHARE * loaded_layers.offloaded_bytes(model.model.layers[0]))
    monkeypatch.setattr(loaded_layers, "free_memory", lambda _device: free)
    with counted_loads(model, monkeypatch) as loads:
        visit_layers(model, find_moe_layers(model), data, lambda _step: None, "Test")
    # nothing needs the outputs of the last layer: it computes no batch, but is loaded where layers are loaded entirely
    last = CHECK + (loads_of_pass == 1)
    assert loads == [CHECK + loads_of_pass] * (LAYERS - 1) + [last]
    assert any(warning in message for message in log)


def test_memory_that_is_short_while_a_layer_is_visited(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
):
    """The next layer is loaded when it is its turn, and later ones too."""
    model, data = on_disk(source, tmp_path / "disk"), batches()
    copy, threads = loaded_layers._copy, []

    def fail(offloaded: Any) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            threads.append(threading.current_thread())
            raise torch.OutOfMemoryError("full")
        return copy(offloaded)

    monkeypatch.setattr(loaded_layers, "_copy", fail)
    with counted_loads(model, monkeypatch) as loads:
        visit_layers(model, find_moe_layers(model), data, lambda _step: None, "Test")
    assert loads == [CHECK + 1] * LAYERS
    assert len(threads) == 1
    assert any("Too little GPU memory is free to load the next layer ahead" in message for message in log)


def test_an_error_in_a_visit_releases_what_is_loaded(source: Path, tmp_path: Path):
    model = on_disk(source, tmp_path / "disk")

    def fail(step: DecoderStep) -> None:
        raise CoverageError("stop")

    with pytest.raises(CoverageError, match="stop"):
        visit_layers(model, find_moe_layers(model), batches(), fail, "Test")
    assert not OffloadCache.keep_onloaded_values
    assert not OffloadCache.offloading_disabled
