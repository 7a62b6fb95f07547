"""The pass layer by layer, compared with the model's own forward, for every family that tests know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from moe_coverage_plugin import AttributionModifier, ChannelPruningModifier, CoverageModifier
from moe_coverage_plugin.calibration import layerwise, observation
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling import grouped_experts
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears, find_moe_layers, projections
from tests.calibration.brute_force import open_stock, save_float64
from tests.calibration.test_offload import on_disk
from tests.tiny import (
    CONFIGS,
    LISTED,
    VOCAB,
    add_tokenizer,
    diversify,
    listed_model,
    seeing_config,
    token_batches,
)

pytestmark = pytest.mark.slow

WIDTH = {"moe_intermediate_size": 64, "intermediate_size": 64}
SEEING = "qwen3_vl_moe"
FAMILIES = (*CONFIGS, LISTED, SEEING)
AVX2 = {"architecture": "x86_64", "cpu_name": "old", "avx2": True, "avx512_bf16": False, "amx_bf16": False}


def random_model(family: str = "qwen3_moe", dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A model of few layers with linear experts that was never on disk."""
    torch.manual_seed(0)
    if family == LISTED:
        model = listed_model(**WIDTH, **config)
        linearize_expert_lists(model)
    elif family == SEEING:
        model = AutoModelForImageTextToText.from_config(seeing_config(**WIDTH, **config))
    else:
        keys = CONFIGS[family]().to_dict().keys()
        shape = {key: value for key, value in WIDTH.items() if key in keys}
        # those with linear attention, which is slow on CPUs, have one layer of each kind
        layers = {"num_hidden_layers": 2} if family.startswith("qwen3_") and family != "qwen3_moe" else {}
        model = AutoModelForCausalLM.from_config(CONFIGS[family](**shape | layers | config))
    diversify(model)
    return linearize_moe(model).to(dtype).eval()


def data(padding: str, seed: int = 0) -> list[dict[str, Tensor]]:
    """Three batches of unequal size and length; without masks if ``padding`` is ``none``."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for samples, length in ((2, 9), (1, 5), (3, 12)):
        batch = {"input_ids": torch.randint(2, VOCAB, (samples, length), generator=generator)}
        if padding != "none":
            mask = torch.ones_like(batch["input_ids"])
            for row in range(samples):
                part = slice(length - row, None) if padding == "right" else slice(None, row)
                mask[row, part] = 0
            batch |= {"attention_mask": mask, "input_ids": batch["input_ids"].masked_fill(mask == 0, 1)}
        batches.append(batch)
    return batches


# what the experts of a layer get for the real tokens of all batches: inputs, expert numbers, routing weights
Seen = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def own_forward(model: Any, batches: Sequence[dict[str, Tensor]]) -> dict[str, Seen]:
    """What each layer's experts get in the model's own forward."""
    seen: dict[str, list[Seen]] = {}

    def record(layer: MoELayer, real_T: Tensor, _module: Module, args: tuple) -> None:
        seen.setdefault(layer.name, []).append(tuple(each[real_T] for each in args))

    for batch in batches:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        handles = [
            layer.experts.register_forward_pre_hook(partial(record, layer, mask.flatten().bool()))
            for layer in find_moe_layers(model)
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
    return {name: tuple(map(torch.cat, zip(*each, strict=True))) for name, each in seen.items()}


class Recorder:
    """Visits layers, keeps what it sees, and changes layers by a function."""

    def __init__(self, change: Callable[[MoELayer], None] | None = None):
        self.seen: dict[str, Seen] = {}
        self.held: dict[str, Tensor] = {}
        self.visited: list[list[str]] = []
        self.masks: list[Tensor | None] = []
        self._change = change

    def visit(self, step: DecoderStep) -> None:
        hooked = step.decoder_layer.register_forward_hook(lambda *_: self.masks.append(step.current.real_T))
        changes = self._change is not None and bool(step.layers)
        for layer, inputs in step.observe(changes):
            self.seen[layer.name] = inputs.x_TH, inputs.ids_TK, inputs.weights_TK
            self.held[layer.name] = inputs.held_T
            if self._change is not None:
                self._change(layer)
        hooked.remove()
        self.visited.append([layer.name for layer in step.layers])


def visited(model: Any, batches: Sequence[dict[str, Tensor]], change=None) -> Recorder:
    recorder = Recorder(change)
    visit_layers(model, find_moe_layers(model), batches, recorder.visit, "Test")
    return recorder


def assert_same(found: Seen, expected: Seen, rtol: float = 1e-9) -> None:
    assert torch.equal(found[1], expected[1]), "tokens are routed differently"
    for value, wanted in ((found[0], expected[0]), (found[2], expected[2])):
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))


# --- the values are those of the model


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_see_what_they_see_in_the_models_own_forward(family: str):
    """In their order; batches differ in length, and have padding on one side or no mask."""
    model = random_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = find_moe_layers(model)
    for padding in ("none", "right", "left"):
        batches = data(padding)
        recorder = visited(model, batches)
        for name, expected in own_forward(model, batches).items():
            assert_same(recorder.seen[name], expected)
        assert [each for each in recorder.visited if each] == [[layer.name] for layer in layers]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_model_is_as_before(tmp_path):
    """Its forward, its hooks, its mode and its cache."""
    model = random_model().train()
    forwards = [module.forward for module in model.modules()]
    visited(model, data("right"))
    assert [module.forward for module in model.modules()] == forwards
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training
    assert model.config.use_cache


def test_some_layers_of_the_model():
    """The others compute, but are not observed."""
    model, recorder, batches = random_model(), Recorder(), data("right")
    layers = find_moe_layers(model)
    visit_layers(model, layers[1:2], batches, recorder.visit, "Test")
    assert list(recorder.seen) == [layers[1].name]
    assert recorder.visited == [[], [layers[1].name], []]
    assert_same(recorder.seen[layers[1].name], own_forward(model, batches)[layers[1].name])


def test_a_layer_that_is_not_observed():
    """It computes as the model does."""
    model, batches = random_model(), data("right")
    layers = find_moe_layers(model)
    seen: dict[str, Seen] = {}

    def visit(step: DecoderStep) -> None:
        for layer, inputs in step.observe() if step.layers[0].name == layers[2].name else []:
            seen[layer.name] = inputs.x_TH, inputs.ids_TK, inputs.weights_TK

    visit_layers(model, layers, batches, visit, "Test")
    assert_same(seen[layers[2].name], own_forward(model, batches)[layers[2].name])


# --- changes


@torch.no_grad()
def shrink(layer: MoELayer) -> None:
    """Change experts as pruned ones are changed: new weights of unequal widths; the last expert keeps its own."""
    for number, mlp in enumerate(layer.mlps[:-1]):
        stride = 2 + number % 2
        for name, linear in projections(mlp).items():
            kept = linear.weight[:, ::stride] if name == "down_proj" else linear.weight[::stride]
            linear.weight = torch.nn.Parameter(kept.contiguous())
            linear.out_features, linear.in_features = linear.weight.shape
            if name != "down_proj" and linear.bias is not None:
                linear.bias = torch.nn.Parameter(linear.bias[::stride].contiguous())


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        ("qwen3_moe", "none"),
        ("qwen3_moe", "left"),
        ("deepseek_v2", "right"),
        ("gpt_oss", "left"),
        ("qwen3_next", "right"),
    ],
)
def test_later_layers_see_a_changed_layer(family: str, padding: str):
    """Each layer is changed after it was seen, so it sees the outputs of changed layers and its own old weights."""
    model, unchanged, batches = random_model(family), random_model(family), data(padding)
    recorder = visited(model, batches, shrink)
    expected, old = own_forward(model, batches), own_forward(unchanged, batches)
    first, *later = find_moe_layers(model)
    assert len(set(first.widths)) == 3
    assert_same(recorder.seen[first.name], old[first.name])
    for layer in later:
        assert_same(recorder.seen[layer.name], expected[layer.name])
        assert not torch.allclose(recorder.seen[layer.name][0], old[layer.name][0], rtol=1e-3)


def test_only_some_layers_change():
    model, batches = random_model(), data("right")
    layers = find_moe_layers(model)
    recorder = visited(model, batches, lambda layer: shrink(layer) if layer.name == layers[1].name else None)
    for layer in layers:
        assert_same(recorder.seen[layer.name], own_forward(model, batches)[layer.name])


def test_two_moe_layers_in_one_decoder_layer():
    """The second one gets the outputs of the first one, so that computes although it will change."""
    model, batches = random_model(), data("right")
    first, second, third = model.model.layers

    def both(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return second.forward(first_forward(hidden, *args, **kwargs), *args, **kwargs)

    first_forward = first.forward
    first.add_module("second", second)
    first.forward = both
    model.model.layers = ModuleList([first, third])
    recorder = visited(model, batches, shrink)
    expected = own_forward(model, batches)
    layers = find_moe_layers(model)
    assert recorder.visited == [[layer.name for layer in layers[:2]], [layers[2].name]]
    assert_same(recorder.seen[layers[2].name], expected[layers[2].name])


# --- layers of which only experts change


class OnlyExperts(Recorder):
    """Changes only experts, and counts the batches that each decoder layer with experts computes."""

    def __init__(self, change: Callable[[MoELayer], None]):
        super().__init__(change)
        self.change = change
        self.calls: list[int] = []
        self.repeats: list[bool] = []

    def visit(self, step: DecoderStep) -> None:
        if not step.layers:
            return
        number = len(self.calls)
        self.calls.append(0)

        def count(*_: Any) -> None:
            self.calls[number] += 1

        step.decoder_layer.register_forward_hook(count)
        for layer, inputs in step.observe(changes=True, only_experts=True):
            self.seen[layer.name] = inputs.x_TH, inputs.ids_TK, inputs.weights_TK
            self.change(layer)
        self.repeats.append(step.repeats)


def scaled(layer: Module) -> None:
    """Let a decoder layer output twice what it does."""
    layer.register_forward_hook(
        lambda _module, _args, output: (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", [None, "padded", "scaled", "on the host"])
def test_a_layer_adds_what_its_changed_experts_output(
    family: str, other: str | None, monkeypatch: pytest.MonkeyPatch, log: list[str]
):
    """Its attention computes once for all batches and twice for the first, unless its output is another sum."""
    if other is not None and family != "qwen3_moe":
        pytest.skip("of one family")
    # Granite multiplies what it adds to the residual stream
    config = {"residual_multiplier": 0.22} if family == "granitemoe" else {}
    model, batches = random_model(family, **config), data("right" if other == "padded" else "none")
    if other == "scaled":
        for layer in model.model.layers:
            scaled(layer)
    if other == "on the host":
        places = layerwise._Places(torch.device("cpu"), torch.device("meta"))
        monkeypatch.setattr(layerwise._States, "places", property(lambda _: places, lambda *_: None), raising=False)
        monkeypatch.setattr(
            layerwise, "LayerInputs", lambda experts, tokens, _: LayerInputs(experts, tokens, torch.device("cpu"))
        )
    layers = find_moe_layers(model)
    recorder = OnlyExperts(shrink)
    visit_layers(model, layers, batches, recorder.visit, "Test")
    # the model's own forward calls the layers, too
    *calls, calls_of_last = recorder.calls
    expected = own_forward(model, batches)
    for layer in layers[1:]:
        assert_same(recorder.seen[layer.name], expected[layer.name])
    repeats = other is not None or family == "granitemoe"
    assert recorder.repeats == [repeats] * len(calls) + [False]
    checks = 0 if other in ("padded", "on the host") else 2
    assert calls == [len(batches) * (2 if repeats else 1) + checks] * len(calls)
    # nothing sees its outputs
    assert calls_of_last == len(batches)
    assert any("computed all batches twice" in line for line in log) == repeats


@pytest.mark.parametrize("one_call", [False, True])
def test_weights_that_are_stacked_once_for_all_batches(monkeypatch: pytest.MonkeyPatch, one_call: bool):
    """As on a GPU, with experts of one width and, once changed, of several."""
    model, batches = random_model(dtype=torch.float32), data("none")
    monkeypatch.setattr(layerwise._States, "on_gpu", True)
    monkeypatch.setattr(grouped_experts, "_in_one_call", lambda _: one_call)
    stacks: list[list[Linear]] = []
    project = grouped_experts.PaddedProjection.__init__
    monkeypatch.setattr(
        grouped_experts.PaddedProjection, "__init__", lambda *args: (stacks.append(args[2]), project(*args))[1]
    )
    layers = find_moe_layers(model)
    recorder = OnlyExperts(shrink)
    visit_layers(model, layers, batches, recorder.visit, "Test")
    assert recorder.repeats == [False] * len(layers)
    # the projections of each layer but the last, with changed weights; the first batch of a layer is not counted
    assert len(stacks) == (3 * (len(layers) - 1) if one_call else 0)
    monkeypatch.undo()
    expected = own_forward(model, batches)
    for layer in layers[1:]:
        assert_same(recorder.seen[layer.name], expected[layer.name], rtol=1e-5)
    unchanged = random_model(dtype=torch.float32)
    monkeypatch.setattr(layerwise._States, "on_gpu", True)
    monkeypatch.setattr(grouped_experts, "_in_one_call", lambda _: one_call)
    seen = visited(unchanged, batches).seen
    monkeypatch.undo()
    for name, wanted in own_forward(unchanged, batches).items():
        assert_same(seen[name], wanted, rtol=1e-5)


# --- layers behind experts


@torch.no_grad()
def inputs_of_linears(model: Any, layers: Sequence[MoELayer], batch: dict[str, Tensor]) -> dict[Linear, Tensor]:
    """Of the model's own forward with experts of weights that are given."""
    experts = {linear for layer in layers for linear in expert_linears(layer)}
    found: dict[Linear, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda module, args: found.update({module: args[0].clone()}))
        for module in model.modules()
        if isinstance(module, Linear) and module not in experts
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("behind", [False, True])
def test_linear_layers_that_see_what_experts_output(family: str, behind: bool):
    """In each decoder layer: those whose inputs change when the experts of this layer do."""
    model, batches = random_model(family), data("right")
    layers = find_moe_layers(model)
    found: dict[str, bool] = {}

    def ask(step: DecoderStep) -> None:
        if behind:
            step.decoder_layer.behind = Linear(1, 1)
            step.decoder_layer.register_forward_hook(lambda layer, _args, output: look(layer.behind, output))
        experts = {linear for layer in step.layers for linear in expert_linears(layer)}
        inside = [each for each in step.decoder_layer.modules() if isinstance(each, Linear) and each not in experts]
        found.update(dict.fromkeys([layer.name for layer in step.layers], step.depends_on_experts(inside)))
        ((layer, inputs),) = step.observe() or [(None, None)]
        assert layer is None or len(inputs.x_TH) == sum(int(each["attention_mask"].sum()) for each in batches)

    def look(module: Module, output: Any) -> None:
        for hook in module._forward_pre_hooks.values():
            hook(module, (output[0] if isinstance(output, tuple) else output,))

    visit_layers(model, layers, batches, ask, "Test")
    assert set(found) == {layer.name for layer in layers}
    if behind:
        assert all(found.values())
        return
    before = inputs_of_linears(model, layers, batches[0])
    for layer in layers:
        for mlp in layer.mlps:
            projections(mlp)["down_proj"].weight.data *= 1.5
        inside = {linear for linear in before if linear in set(decoder_layer_of(model, layer).modules())}
        after = inputs_of_linears(model, layers, batches[0])
        assert found[layer.name] == any(not torch.equal(before[each], after[each]) for each in inside), layer.name
        before = after


def decoder_layer_of(model: Any, layer: MoELayer) -> Module:
    """The innermost module of a list that contains the layer."""
    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    holders = [each for one in lists for each in one if layer.moe in set(each.modules())]
    return min(holders, key=lambda each: len(list(each.modules())))


# --- held-back tokens


def held_of(batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Flags ``[B, S]`` of each batch."""
    return [
        layerwise._current(index, batch, batches).held_T.view_as(batch["input_ids"])
        for index, batch in enumerate(batches)
    ]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_fourth_sample_is_held_back(size: int):
    """Counted over all batches."""
    batches = [{"input_ids": torch.ones(min(size, 13 - start), 5).long()} for start in range(0, 13, size)]
    held = torch.cat(held_of(batches))
    assert held.all(1).tolist() == held.any(1).tolist()
    assert held.all(1).nonzero().flatten().tolist() == [3, 7, 11]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("length", [8, 21, 64])
def test_of_few_samples_two_of_eight_parts_are_held_back(size: int, length: int):
    batches = [{"input_ids": torch.ones(size, length).long()} for _ in range(7 // size)]
    expected = [position * 8 // length in (3, 7) for position in range(length)]
    for held in held_of(batches):
        assert held.tolist() == [expected] * size
        assert held.sum() in range(size * (length // 4 - 1), size * (length // 4 + 3))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_part(side: str):
    """The same tokens are held back with and without padding; a sample may have only padding."""
    plain = held_of([{"input_ids": torch.ones(1, 16).long()}])[0][0]
    mask = torch.zeros(2, 40, dtype=torch.int64)
    real = slice(24, 40) if side == "left" else slice(0, 16)
    mask[0, real] = 1
    padded = held_of([{"input_ids": torch.ones(2, 40).long(), "attention_mask": mask}])[0]
    assert torch.equal(padded[0, real], plain)


def test_visitors_get_the_masks_of_their_batch():
    batches = data("right")
    recorder = visited(random_model(), batches)
    expected = [layerwise._current(index, batch, batches) for index, batch in enumerate(batches)]
    assert len(recorder.masks) == 3 * len(batches)
    for number, found in enumerate(recorder.masks):
        batch = batches[number % len(batches)]
        assert (found is None) == bool(batch["attention_mask"].all())
        assert found is None or torch.equal(found, batch["attention_mask"].bool().flatten())
    masks = [batch["attention_mask"].bool().flatten() for batch in batches]
    held_T = torch.cat([each.held_T[mask] for each, mask in zip(expected, masks, strict=True)])
    assert all(torch.equal(found, held_T) for found in recorder.held.values())


# --- models that this pass cannot run


class Reordered(ModuleList):
    """Decoder layers whose list, when sliced as families do, is what ``calls`` makes of it."""

    def __init__(self, layers: ModuleList, calls: Callable[[list[Module]], list[Any]]):
        super().__init__(layers)
        self._calls = calls

    def __getitem__(self, index):
        return self._calls(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)


def reordered(calls: Callable[[list[Module]], list[Any]]) -> Any:
    model = random_model()
    model.model.layers = Reordered(model.model.layers, calls)
    return model


@pytest.mark.parametrize(
    ("calls", "times"),
    [(lambda layers: layers * 2, 6), (lambda layers: [*layers, layers[0]], 4), (lambda layers: layers[:-1], 2)],
    ids=["loop", "one again", "one skipped"],
)
def test_a_decoder_layer_that_is_not_called_once(calls, times: int):
    model, recorder = reordered(calls), Recorder()
    with pytest.raises(CoverageError, match=f"calls its 3 decoder layers {times} times, but each must be called once"):
        visit_layers(model, find_moe_layers(model), data("right"), recorder.visit, "Test")
    assert not recorder.visited


def test_one_decoder_layer_at_two_places():
    model = random_model()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(CoverageError, match="calls its 2 decoder layers 3 times"):
        visited(model, data("right"))


def test_hidden_states_that_change_between_layers():
    def scaled(layer: Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return layer(2 * hidden, *args, **kwargs)

    model, recorder = (
        reordered(lambda layers: [layers[0], *(partial(scaled, layer) for layer in layers[1:])]),
        Recorder(),
    )
    with pytest.raises(CoverageError, match=r"one by one, differ from the model by \d+%, above 5%: choose channel_m"):
        visit_layers(model, find_moe_layers(model), data("right"), recorder.visit, "Test")
    assert not recorder.visited


def test_layers_that_are_called_in_another_order():
    """The order of calls counts, not that of the list."""
    model, batches = reordered(lambda layers: layers[::-1]), data("right")
    recorder = visited(model, batches)
    layers = find_moe_layers(model)
    assert recorder.visited == [[layer.name] for layer in reversed(layers)]
    for name, expected in own_forward(model, batches).items():
        assert_same(recorder.seen[name], expected)


@pytest.mark.parametrize("change", [None, shrink], ids=["same", "changed"])
def test_layers_that_write_into_their_input(change):
    def writes(layer: Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden.mul_(0.5).add_(layer(hidden, *args, **kwargs))

    models = [random_model() for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            layer.forward = partial(writes, layer.forward)
    batches = data("right")
    recorder = visited(models[0], batches, change)
    for name, expected in own_forward(models[0], batches).items():
        assert_same(recorder.seen[name], expected)


# --- where hidden states are kept


def limit_memory(monkeypatch: pytest.MonkeyPatch, gpu: int, host: int) -> None:
    """Free bytes of a card and of host memory."""
    monkeypatch.setattr(layerwise, "free_memory", lambda device: {"cuda:1": gpu}[str(device)])
    monkeypatch.setattr(layerwise, "free_host_memory", lambda: host)


@pytest.mark.parametrize(
    ("gpu", "states", "inputs"), [(3600, "cuda:1", "cuda:1"), (3598, "cpu", "cuda:1"), (1598, "cpu", "cpu")]
)
def test_hidden_states_that_do_not_fit_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch, gpu: int, states: str, inputs: str
):
    """They may take half of what is free; 1000 bytes before a layer, and 800 without padding before its experts."""
    limit_memory(monkeypatch, gpu, host=1800)
    found = layerwise._places(torch.device("cuda:1"), 1000, 800)
    assert found == (torch.device(states), torch.device(inputs))


@pytest.mark.parametrize(("gpu", "host"), [(3598, 999), (1598, 1799)])
def test_hidden_states_that_fit_nowhere(monkeypatch: pytest.MonkeyPatch, gpu: int, host: int):
    limit_memory(monkeypatch, gpu, host)
    with pytest.raises(CoverageError, match=r"GiB of host memory, of which .* are free.*: calibrate on fewer samples"):
        layerwise._places(torch.device("cuda:1"), 1000, 800)


def test_hidden_states_of_a_model_on_the_cpu_stay():
    assert layerwise._places(torch.device("cpu"), 10**18, 10**18) == (torch.device("cpu"), torch.device("cpu"))


# --- models that compute elsewhere


def test_an_offloaded_model(tmp_path):
    source = save_float64(tmp_path / "model", "qwen2_moe")
    model, batches = on_disk(source, tmp_path / "disk"), data("right")
    expected = own_forward(model, batches)
    recorder = visited(model, batches)
    for name, wanted in expected.items():
        assert_same(recorder.seen[name], wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_bfloat16_model_on_a_processor_that_is_slow_in_it(monkeypatch: pytest.MonkeyPatch, family: str):
    """The values are those of the same model in float32, and the weights stay in bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2)
    model, batches = random_model(family, torch.bfloat16), data("right")
    wide = random_model(family, torch.bfloat16).float()
    recorder = visited(model, batches)
    for name, expected in own_forward(wide, batches).items():
        assert recorder.seen[name][0].dtype == torch.float32
        assert_same(recorder.seen[name], expected, rtol=1e-5)
    assert all(each.dtype == torch.bfloat16 for each in model.parameters())


def test_a_bfloat16_model_on_a_processor_that_is_fast_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2 | {"amx_bf16": True})
    model, batches = random_model(dtype=torch.bfloat16), data("right")
    recorder = visited(model, batches)
    for name, expected in own_forward(model, batches).items():
        assert recorder.seen[name][0].dtype == torch.bfloat16
        torch.testing.assert_close(recorder.seen[name][0], expected[0])


@pytest.mark.parametrize("metric", ["obs", "fisher"])
def test_oneshot_stops_before_the_gradient_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str):
    """Scores can take hours, and reconstruction comes after them."""
    began: list[str] = []
    monkeypatch.setattr(observation, "observe_batches", lambda *_: began.append("scores"))
    source = add_tokenizer(save_float64(tmp_path / "model", "qwen3_moe"))
    model: Any = open_stock(source, linear=True)
    model.model.layers = Reordered(model.model.layers, lambda layers: [*layers, layers[0]])
    recipe = [AttributionModifier(channel_metric=metric), CoverageModifier(sparsity=0.5), ChannelPruningModifier()]
    with pytest.raises(CoverageError, match="each must be called once"):
        oneshot(model=model, dataset=token_batches(samples=2, length=16), recipe=recipe)
    assert not began
