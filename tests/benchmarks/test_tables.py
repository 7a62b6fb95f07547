"""The recipes of all tables are valid: the modifiers accept their fields."""

from __future__ import annotations

import pytest
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import REAPPruningModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

import moe_coverage_plugin
from benchmarks.allocation.recipes import quantizer
from benchmarks.allocation.tables import TITLES, Setting, settings

SETTINGS = settings(["c4", "wiki"])
TOOLKIT = {
    cls.__name__: cls for cls in (REAPPruningModifier, WandaPruningModifier, QuantizationModifier, GPTQModifier)
}


def table(key: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.table == key]


@pytest.mark.parametrize("key", list(TITLES))
def test_modifiers_accept_the_fields_of_recipes(key: str):
    for row in table(key):
        for name, fields in (row.recipe.modifiers | quantizer(row.bits, row.rounding)).items():
            modifier = TOOLKIT.get(name) or getattr(moe_coverage_plugin, name)
            assert set(fields) <= set(modifier.model_fields)
            modifier(**fields)
