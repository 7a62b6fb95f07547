"""Models that the toolkit makes linear after loading, without fused experts of several layers in memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from torch.nn import Module
from transformers import AutoModelForCausalLM

from moe_coverage_plugin.checkpoint.opening import open_model
from tests.tiny import save_model

LAYERS = 4
# the last one is loaded as linear experts
FAMILIES = ["deepseek_v2", "ernie4_5_moe", "qwen3_5_moe", "qwen3_moe"]


class Alive:
    """Counts fused experts in memory when the toolkit begins to copy those of a layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.most = 0
        self._seen: list[weakref.ref[Module]] = []
        copied = LinearExperts2D.__dict__["from_experts_module"].__func__

        def counted(cls: type, experts: Module, config: Any) -> LinearExperts2D:
            self._seen.append(weakref.ref(experts))
            self.most = max(self.most, sum(each() is not None for each in self._seen))
            return copied(cls, experts, config)

        monkeypatch.setattr(LinearExperts2D, "from_experts_module", classmethod(counted))


def open_by_toolkit(path: Path) -> Module:
    with load_quantizable_moe():
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_released_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path = save_model(tmp_path, family, num_hidden_layers=LAYERS)
    expected = open_by_toolkit(path).state_dict()
    alive = Alive(monkeypatch)
    found = open_model(str(path), None).state_dict()
    assert alive.most <= 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in found.items())


def test_toolkit_keeps_fused_experts_until_all_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(tmp_path, "deepseek_v2", num_hidden_layers=LAYERS)
    alive = Alive(monkeypatch)
    open_by_toolkit(path)
    # the first layer is dense
    assert alive.most == LAYERS - 1
