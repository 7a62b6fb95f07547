"""What is said when a model is quantized is what vLLM's half will say when the checkpoint is served."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from moe_coverage_plugin.serving.scheme import expert_scheme
from moe_coverage_plugin.surgery.expert_schemes import unserved

FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True}
OTHERS = {
    "by_channel": FOUR_BITS | {"strategy": "channel"},
    "by_tensor": FOUR_BITS | {"strategy": "tensor"},
    "groups_of_4": FOUR_BITS | {"strategy": "group", "group_size": 4},
    "groups_of_32": FOUR_BITS | {"strategy": "group", "group_size": 32},
}
SCHEMES = {name: preset_name_to_scheme(name, ["Linear"]) for name in PRESET_SCHEMES} | {
    name: QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args)) for name, args in OTHERS.items()
}


@pytest.mark.parametrize("name", SCHEMES)
def test_both_halves_agree(name: str):
    scheme = SCHEMES[name]
    # vLLM tells the format from the scheme as the toolkit does when it writes
    entry = {"weights": scheme.weights, "input_activations": scheme.input_activations, "format": "pack-quantized"}
    served = not isinstance(expert_scheme(entry if scheme.weights is not None else None), str)
    assert (unserved(scheme) is None) == served


def test_schemes_of_either_kind_are_known():
    assert {name for name, scheme in SCHEMES.items() if unserved(scheme) is None} == {
        "UNQUANTIZED",
        "W4A16",
        "W4A16_ASYM",
        "by_channel",
        "groups_of_32",
    }
