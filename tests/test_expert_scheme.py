"""The compressing half allows the schemes that the serving half serves."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch.nn import Linear

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.expert_scheme import ExpertScheme, check_activations, expert_scheme

FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
BY_CHANNEL = EIGHT_BITS | {"strategy": "channel"}
BY_TOKEN = EIGHT_BITS | {"strategy": "token", "dynamic": True}


def scheme_of(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **others: Any) -> QuantizationScheme:
    activations = QuantizationArgs(**inputs) if inputs is not None else None
    options = {"weights": QuantizationArgs(**weights), "input_activations": activations} | others
    return QuantizationScheme(targets=["Linear"], **options)


SCHEMES = {name: preset_name_to_scheme(name, ["Linear"]) for name in PRESET_SCHEMES} | {
    "by_channel": scheme_of(FOUR_BITS | {"strategy": "channel"}),
    "by_tensor": scheme_of(FOUR_BITS | {"strategy": "tensor"}),
    "groups_of_4": scheme_of(FOUR_BITS | {"strategy": "group", "group_size": 4}),
    "groups_of_32": scheme_of(FOUR_BITS | {"strategy": "group", "group_size": 32}),
    "float8_as_the_preset": scheme_of(BY_CHANNEL, BY_TOKEN),
    "float8_weights_only": scheme_of(BY_CHANNEL),
    "float8_weights_by_tensor": scheme_of(EIGHT_BITS | {"strategy": "tensor"}, BY_TOKEN),
    "float8_weights_by_group": scheme_of(EIGHT_BITS | {"strategy": "group", "group_size": 32}, BY_TOKEN),
    "float8_inputs_by_tensor": scheme_of(BY_CHANNEL, EIGHT_BITS | {"strategy": "tensor", "dynamic": True}),
    "float8_inputs_static": scheme_of(BY_CHANNEL, EIGHT_BITS | {"strategy": "tensor"}),
    "float8_weights_int8_inputs": scheme_of(BY_CHANNEL, BY_TOKEN | {"type": "int"}),
    "int8_weights_float8_inputs": scheme_of(BY_CHANNEL | {"type": "int"}, BY_TOKEN),
}
SERVED = {
    "UNQUANTIZED",
    "W4A16",
    "W4A16_ASYM",
    "FP8_DYNAMIC",
    "by_channel",
    "groups_of_32",
    "float8_as_the_preset",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_both_halves_agree(name: str):
    scheme = SCHEMES[name]
    entry = None
    if scheme.weights is not None:
        # the format that the toolkit writes, by which vLLM distinguishes schemes
        written = infer_module_format(Linear, scheme).value
        entry = {"weights": scheme.weights, "input_activations": scheme.input_activations, "format": written}
    served = not isinstance(expert_scheme(entry), str)
    # before the toolkit decides on a format
    assert isinstance(expert_scheme(dict(scheme)), ExpertScheme) == served


def test_schemes_that_are_served():
    assert {
        name for name, scheme in SCHEMES.items() if isinstance(expert_scheme(dict(scheme)), ExpertScheme)
    } == SERVED


@pytest.mark.parametrize(
    ("scheme", "description"),
    [
        (SCHEMES["FP8"], "float8 weights by tensor, static float8 inputs by tensor"),
        (SCHEMES["FP8_BLOCK"], "float8 weights by block, dynamic float8 inputs by group"),
        (SCHEMES["W8A8"], "int8 weights by channel, dynamic int8 inputs by token"),
        (SCHEMES["W4AFP8"], "int4 weights by group, dynamic float8 inputs by token"),
        (
            scheme_of(BY_CHANNEL, BY_TOKEN, output_activations=QuantizationArgs(**BY_TOKEN)),
            "float8 weights by channel, dynamic float8 inputs by token, dynamic float8 outputs by token",
        ),
        (
            scheme_of(BY_CHANNEL, BY_TOKEN, format="naive-quantized"),
            "float8 weights by channel, dynamic float8 inputs by token, format naive-quantized",
        ),
    ],
)
def test_the_error_for_other_activations_describes_them(scheme: QuantizationScheme, description: str):
    with pytest.raises(CoverageError) as caught:
        check_activations(dict(scheme), "they have")
    message = str(caught.value)
    assert message.startswith(f"they have quantized activations ({description}), but engines serve ")
    assert "quantize them with FP8_DYNAMIC or W4A16, or prune with layout='padded'" in message


@pytest.mark.parametrize("name", sorted(SERVED))
def test_schemes_that_are_served_pass_the_check(name: str):
    check_activations(dict(SCHEMES[name]), "they have")


def test_the_format_that_the_toolkit_adds_makes_no_difference():
    scheme = scheme_of(BY_CHANNEL, BY_TOKEN, format="float-quantized")
    assert expert_scheme(dict(scheme)) == ExpertScheme(8)
