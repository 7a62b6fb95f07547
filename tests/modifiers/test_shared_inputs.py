"""Linear layers with the same inputs: their sums, compared with loops, and their GPTQ, with that of each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from hypothesis import given
from hypothesis import strategies as st
from llmcompressor.observers import Observer
from torch import Tensor
from torch.nn import Linear

from moe_coverage_plugin import LayerwiseGPTQModifier
from moe_coverage_plugin.modifiers import layerwise_gptq, shared_inputs
from moe_coverage_plugin.modifiers.shared_inputs import InputSums, StackedLinear, found_qparams, hessian, stacked
from tests.modifiers.harness import compress, save_tiny
from tests.modifiers.test_layerwise_gptq import RUN, quantized, share
from tests.modifiers.test_reconstruction_pass import SMALL, W4
from tests.tiny import add_tokenizer

WIDTH = 5


# --- sums


@given(
    calls=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6), max_size=4),
    padded=st.booleans(),
)
def test_sums_equal_those_of_each_layer(calls: list[list[tuple[int, int]]], padded: bool):
    """Of any calls of four layers with three inputs of each batch, with and without padding."""
    linears = [Linear(WIDTH, 2) for _ in range(4)]
    sums, expected = InputSums(), [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in linears]
    seen: list[list[tuple[int, int]]] = [[] for _ in linears]
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(calls):
        inputs = [torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)]
        real_T = torch.rand(6, generator=generator) < 0.6 if padded else None
        for layer, source in batch:
            sums.add(linears[layer], inputs[source], real_T)
            rows = inputs[source].flatten(0, 1)
            expected[layer] += hessian(rows if real_T is None else rows[real_T])
            seen[layer].append((number, source))
    sums.forget_last()
    found = sums.pop(linears)
    for linear, total_AA in zip(linears, expected, strict=True):
        torch.testing.assert_close(found[linear].double(), total_AA)
    for one in range(4):
        for other in range(4):
            # never shared by layers with other inputs
            if found[linears[one]] is found[linears[other]] and one != other:
                assert seen[one] == seen[other]
    assert not any(each.any() for each in sums.pop(linears).values())


def test_layers_that_are_called_in_turn_share_one_product(monkeypatch: pytest.MonkeyPatch):
    products: list[Tensor] = []
    monkeypatch.setattr(shared_inputs, "hessian", lambda x_MA: (products.append(x_MA), hessian(x_MA))[1])
    q_proj, k_proj, o_proj = (Linear(WIDTH, width) for width in (4, 2, 3))
    sums = InputSums()
    for _ in range(3):
        x, y = torch.randn(1, 4, WIDTH), torch.randn(1, 4, WIDTH)
        for module, values in ((q_proj, x), (k_proj, x), (o_proj, y)):
            sums.add(module, values, None)
    assert len(products) == 6
    found = sums.pop([q_proj, k_proj, o_proj])
    assert found[q_proj] is found[k_proj]
    assert found[o_proj] is not found[k_proj]


def test_an_input_that_was_changed_in_place_is_another_one():
    one, other = Linear(WIDTH, 2), Linear(WIDTH, 2)
    sums, x = InputSums(), torch.ones(3, WIDTH)
    sums.add(one, x, None)
    x.mul_(2)
    sums.add(other, x, None)
    found = sums.pop([one, other])
    assert torch.equal(4 * found[one], found[other])


def test_padding_that_is_not_finite_is_left_out():
    """Attention gives rows of padding values that mean nothing."""
    x = torch.ones(1, 2, WIDTH)
    x[0, 1] = torch.nan
    sums, linear = InputSums(), Linear(WIDTH, 2)
    sums.add(linear, x, torch.tensor([True, False]))
    assert torch.equal(sums.pop([linear])[linear], torch.ones(WIDTH, WIDTH))


# --- one factorization


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights",
    [
        W4["config_groups"]["group_0"]["weights"],
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16},
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "observer": "mse"},
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"},
    ],
    ids=lambda weights: f"{weights['strategy']}-{weights['type']}-{weights.get('symmetric', True)}",
)
def test_weights_are_those_of_each_layer_alone(tmp_path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any]):
    """Scales are equal, and weights but for sums in another order."""
    source = add_tokenizer(save_tiny(tmp_path / "small", **SMALL | {"num_hidden_layers": 1}))
    scheme = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": W4["ignore"]}
    stacks = []
    monkeypatch.setattr(
        layerwise_gptq, "stacked", lambda hessians: (found := stacked(hessians), stacks.extend(found))[0]
    )
    together = compress(source, [LayerwiseGPTQModifier(**scheme)], **RUN)
    monkeypatch.setattr(layerwise_gptq, "stacked", lambda _: [])
    alone = compress(source, [LayerwiseGPTQModifier(**scheme)], **RUN)
    # q, k and v, and gate and up of 8 experts; not with one scale for all rows
    assert len(stacks) == (0 if weights["strategy"] == "tensor" else 9)
    for (name, one), other in zip(quantized(together).items(), quantized(alone).values(), strict=True):
        assert one.quantization_status == QuantizationStatus.FROZEN
        assert not hasattr(one, "weight_observer")
        assert torch.equal(one.weight_scale, other.weight_scale), name
        assert torch.equal(one.weight_zero_point, other.weight_zero_point), name
        assert share(one.weight, other.weight) > 0.995, name


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 8},
        {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False},
        {"num_bits": 4, "strategy": "channel", "observer": "memoryless_mse"},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "strategy": "tensor"},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ],
    ids=lambda weights: f"{weights['strategy']}-{weights.get('type', 'int')}-{weights.get('symmetric', True)}",
)
def test_scales_of_many_modules_are_those_of_each(weights: dict[str, Any], stacks: bool):
    """Bit for bit, also of a weight of zeros."""
    arguments = QuantizationArgs(**weights)
    if stacks and arguments.strategy not in shared_inputs.BY_ROWS:
        pytest.skip("never stacked")
    torch.manual_seed(0)
    linears: list[Any] = [Linear(16, rows, dtype=torch.bfloat16) for rows in (4, 6) * 3]
    linears[1].weight.data.zero_()
    for linear in linears:
        linear.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        name = arguments.observer or "memoryless_minmax"
        linear.weight_observer = Observer.load_from_registry(name, base_name="weight", args=arguments)
    modules = [StackedLinear(linears[first : first + 2]) for first in (0, 2, 4)] if stacks else linears[::2]
    found = []
    for by in (found_qparams, lambda modules: [each.weight_observer.get_qparams() for each in modules]):
        for linear in linears:
            linear.weight_observer(linear.weight)
        found.append(by(modules))
        if not stacks:
            for linear in linears[1::2]:
                linear.weight_observer.get_qparams()
        assert not any(linear.weight_observer.has_statistics for linear in linears)
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert (one["global_scale"] is None) == (other["global_scale"] is None)
        for name in ("scale", "zero_point"):
            assert one[name].dtype == other[name].dtype
            assert torch.equal(one[name], other[name])


def test_only_layers_of_one_scheme_are_stacked():
    linears = [Linear(16, 4) for _ in range(4)]
    for linear, bits in zip(linears, (4, 4, 8, 4), strict=True):
        args = QuantizationArgs(num_bits=bits, strategy="group", group_size=8)
        linear.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shared_AA, own_AA = torch.eye(16), torch.eye(16)
    (stack,) = stacked(dict(zip(linears, (shared_AA, shared_AA, shared_AA, own_AA), strict=True)))
    assert stack.linears == linears[:2]
    assert stack.weight.shape == (8, 16)
    assert list(stack.modules()) == [stack]
