"""GPTQ of weights of one shape, compared with the toolkit's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import gptq_block_update, quantize_weight
from llmcompressor.observers import Observer
from torch import Tensor

from moe_coverage_plugin.modifiers import gptq_batches
from moe_coverage_plugin.modifiers.gptq_batches import QuantizedWeights, Scales, quantize_weights

ROWS, COLUMNS, DAMPENING, COLUMNS_TOGETHER = 24, 96, 0.01, 32
SCHEMES: dict[str, dict[str, Any]] = {
    "group": {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "static"},
    "weight": {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "weight"},
    "asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False, "actorder": None},
    "channel": {"num_bits": 8, "strategy": "channel", "actorder": "static"},
    "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32], "actorder": "static"},
}


def problem(count: int, scheme: dict[str, Any]) -> tuple[Tensor, Tensor, Scales, QuantizationArgs]:
    """Weights, Hessian matrices of correlated inputs, and scales."""
    generator = torch.Generator().manual_seed(count)
    weight_EOA = torch.randn(count, ROWS, COLUMNS, generator=generator)
    mixed_AA = torch.eye(COLUMNS) + 0.3 * torch.randn(COLUMNS, COLUMNS, generator=generator)
    x_EMA = torch.randn(count, 2 * COLUMNS, COLUMNS, generator=generator) @ mixed_AA
    arguments = QuantizationArgs(**scheme)
    found = []
    for weight_OA in weight_EOA:
        observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=arguments)
        observer(weight_OA)
        found.append(observer.get_qparams())
    stacked: list[Any] = [torch.stack([each[name] for each in found]) for name in ("scale", "zero_point")]
    scales = Scales(stacked[0], stacked[1], None)
    return weight_EOA, x_EMA.mT @ x_EMA, scales, arguments


def both(
    weight_EOA: Tensor, hessian_EAA: Tensor, scales: Scales, arguments: QuantizationArgs, dampening: float = DAMPENING
) -> tuple[QuantizedWeights, QuantizedWeights]:
    """Of this package and of the toolkit."""
    ours = quantize_weights(weight_EOA.clone(), hessian_EAA.clone(), scales, arguments, COLUMNS_TOGETHER, dampening)
    toolkits = quantize_weight(
        weight_EOA.clone(),
        hessian_EAA.clone(),
        *scales,
        quant_args=arguments,
        blocksize=COLUMNS_TOGETHER,
        percdamp=dampening,
    )
    return ours, QuantizedWeights._make(toolkits)


def assert_equal(ours: QuantizedWeights, toolkits: QuantizedWeights) -> None:
    """Except for weights that rounding in another order takes to the next step."""
    assert torch.equal(ours.nearest_E, toolkits.nearest_E)
    equal_EOA = torch.isclose(ours.weight_EOA, toolkits.weight_EOA, rtol=1e-4, atol=1e-6)
    assert float(equal_EOA.float().mean()) > 0.999
    torch.testing.assert_close(ours.loss_E, toolkits.loss_E, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
# the toolkit factorizes 16 matrices or more by other functions than fewer
@pytest.mark.parametrize("count", [1, 16])
def test_weights_are_those_of_the_toolkit(name: str, count: int):
    assert_equal(*both(*problem(count, SCHEMES[name])))


def test_the_kernel_for_gpus_accepts_float64_models(monkeypatch: pytest.MonkeyPatch):
    weight_EOA, hessian_EAA, scales, arguments = problem(2, SCHEMES["group"])
    single, _ = both(weight_EOA, hessian_EAA, scales, arguments)
    given: list[torch.dtype] = []

    def kernel(*tensors: Tensor, **options: Any) -> None:
        given.extend(each.dtype for each in (*tensors, options["scale"]))
        gptq_block_update(*tensors, **options)

    monkeypatch.setattr(gptq_batches, "gptq_block_update", kernel)
    wide = scales._replace(scale=scales.scale.double())
    double = quantize_weights(weight_EOA.double(), hessian_EAA, wide, arguments, COLUMNS_TOGETHER, DAMPENING)
    # it works on float32 tensors only, and checks them
    assert set(given) == {torch.float32}
    assert torch.equal(double.weight_EOA, single.weight_EOA.double())


def test_weights_in_16_bits_stay_so():
    weight_EOA, hessian_EAA, scales, arguments = problem(2, SCHEMES["group"])
    ours, toolkits = both(weight_EOA.bfloat16(), hessian_EAA, scales, arguments)
    assert ours.weight_EOA.dtype == torch.bfloat16
    assert_equal(ours, toolkits)


@pytest.mark.parametrize("count", [3, 17])
def test_ugly_hessian_matrices(count: int):
    """Columns without input, fewer tokens than columns, entries of very different size, no positive definite one."""
    weight_EOA, hessian_EAA, scales, arguments = problem(count, SCHEMES["group"])
    hessian_EAA[0, 5] = hessian_EAA[0, :, 5] = 0.0
    sizes_A = torch.logspace(-3, 3, COLUMNS)
    hessian_EAA[1] *= sizes_A[:, None] * sizes_A
    hessian_EAA[2] = 0.0
    ours, toolkits = both(weight_EOA, hessian_EAA, scales, arguments)
    assert_equal(ours, toolkits)
    assert not ours.weight_EOA[0, :, 5].any()
    hessian_EAA[1] = -torch.eye(COLUMNS)
    hessian_EAA[2] = hessian_EAA[2, :8].mT @ hessian_EAA[2, :8]
    ours, toolkits = both(weight_EOA, hessian_EAA, scales, arguments, dampening=0.0)
    assert ours.nearest_E.tolist()[1]
    assert_equal(ours, toolkits)
