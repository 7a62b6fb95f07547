"""Ranges of weights by the mean squares of their inputs: those of the toolkit's observer, and of least error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcompressor.observers import IMatrixMSEObserver, Observer
from torch import Tensor
from torch.nn import Linear

from moe_coverage_plugin.modifiers import weight_ranges
from moe_coverage_plugin.modifiers.weight_ranges import NORM, observe_weighted, weighs_inputs

GROUP = 8


def arguments(
    symmetric: bool = True, strategy: QuantizationStrategy = QuantizationStrategy.GROUP, **kwargs: Any
) -> QuantizationArgs:
    # without patience the toolkit's search does not stop early either
    return QuantizationArgs(
        num_bits=4,
        symmetric=symmetric,
        strategy=strategy,
        group_size=GROUP if strategy == QuantizationStrategy.GROUP else None,
        observer="imatrix_mse",
        observer_kwargs={"patience": 0, "norm": NORM} | kwargs,
    )


def observed(out_features: int, in_features: int, args: QuantizationArgs, seed: int, dtype: torch.dtype) -> Any:
    """A linear layer with outliers and an observer that has not seen it."""
    generator = torch.Generator().manual_seed(seed)
    layer: Any = Linear(in_features, out_features, bias=False, dtype=dtype)
    layer.weight.data = torch.randn(out_features, in_features, generator=generator).pow(3).to(dtype)
    layer.weight_observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args)
    return layer


def squares(in_features: int, seed: int) -> Tensor:
    return torch.rand(in_features, generator=torch.Generator().manual_seed(seed)).pow(4) * 100


@settings(max_examples=30)
@given(
    st.booleans(),
    st.sampled_from([NORM, 3.0]),
    st.sampled_from([QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_ranges_are_those_of_the_toolkit(
    symmetric: bool, norm: float, strategy: QuantizationStrategy, dtype: torch.dtype, seed: int
) -> None:
    """Of three layers, of which two are searched together."""
    args = arguments(symmetric, strategy, norm=norm)
    shapes = [(5, 4 * GROUP), (5, 4 * GROUP), (3, 2 * GROUP)]
    layers = [observed(*shape, args, seed + number, dtype) for number, shape in enumerate(shapes)]
    importance = {layer: squares(layer.in_features, seed + number) for number, layer in enumerate(layers)}
    observe_weighted(importance)
    for number, layer in enumerate(layers):
        assert weighs_inputs(layer)
        expected = observed(*shapes[number], args, seed + number, dtype).weight_observer
        assert isinstance(expected, IMatrixMSEObserver)
        expected._imatrix_sum, expected._imatrix_count = importance[layer], torch.tensor(7)
        expected(layer.weight)
        torch.testing.assert_close(layer.weight_observer.get_qparams(), expected.get_qparams(), rtol=0, atol=0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranges() -> list[Tensor]:
        layers = [observed(4, 2 * GROUP, arguments(), number, torch.float32) for number in range(5)]
        observe_weighted({layer: squares(2 * GROUP, number) for number, layer in enumerate(layers)})
        return [layer.weight_observer.max_vals for layer in layers]

    together = ranges()
    monkeypatch.setattr(weight_ranges, "TOGETHER", 2 * 4 * 2 * GROUP)
    assert all(map(torch.equal, together, ranges()))


@given(st.integers(0, 2**31))
def test_errors_at_the_inputs_are_at_most_those_of_the_entire_range(seed: int) -> None:
    """And lower in some group: the weights have outliers."""
    layer = observed(6, 4 * GROUP, arguments(), seed, torch.float32)
    importance = squares(4 * GROUP, seed)

    def error(observer: Any) -> Tensor:
        found = observer.get_qparams()
        rounded = fake_quantize(layer.weight, found["scale"], found["zero_point"], observer.args)
        return ((rounded - layer.weight).square() * importance).unflatten(1, (-1, GROUP)).sum(-1)

    whole = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=arguments())
    whole(layer.weight)
    observe_weighted({layer: importance})
    nearest, weighted = error(whole), error(layer.weight_observer)
    assert bool((weighted <= nearest * (1 + 1e-5)).all())
    assert bool((weighted < 0.99 * nearest).any())
