"""Runs over a bfloat16 model on a processor without bfloat16 instructions: float32 inside, bfloat16 in the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor.modifiers import Modifier
from transformers import AutoModelForCausalLM

from moe_coverage_plugin import Manifest, load, recommended_recipe
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.checkpoint.runs import tensors
from tests.modifiers.harness import compress, pruning, save_tiny, widths
from tests.modifiers.test_composition import COMPANIONS

pytestmark = pytest.mark.slow

AVX2 = {"architecture": "x86_64", "cpu_name": "EPYC", "avx512_bf16": False, "amx_bf16": False}


@pytest.fixture(autouse=True)
def _slow_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("narrow")
    model = AutoModelForCausalLM.from_pretrained(save_tiny(directory / "wide"))
    model.bfloat16().save_pretrained(directory / "narrow")
    return directory / "narrow"


def messages(log: list[str]) -> list[str]:
    return [message for message in log if "computes in float32" in message]


@pytest.mark.parametrize("name", [name for name in COMPANIONS if name != "awq"])
def test_quantizers_in_the_recipe(narrow: Path, tmp_path: Path, log: list[str], name: str) -> None:
    block_size = 128 if name == "channelwise" else 64
    compress(narrow, [*pruning(0.3, block_size), *COMPANIONS[name]()], output_dir=str(tmp_path / "out"))
    assert len(messages(log)) == 1
    wide = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32)
    log.clear()
    reference = compress(wide, [*pruning(0.3, block_size), *COMPANIONS[name]()])
    assert not messages(log)
    model = load(tmp_path / "out")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert widths(model) == widths(reference)
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert manifest.provenance["compute_dtype"] == "float32"


def test_the_fit_of_the_kept_channels(narrow: Path, tmp_path: Path, log: list[str]) -> None:
    """It equals that of a model opened in float32, up to the rounding of weights that were fitted."""
    compress(narrow, recommended_recipe(0.3, 64, scheme=None), output_dir=str(tmp_path / "narrow"))
    assert len(messages(log)) == 1
    wide = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32)
    compress(wide, recommended_recipe(0.3, 64, scheme=None), output_dir=str(tmp_path / "wide"))
    found, expected = tensors(tmp_path / "narrow"), tensors(tmp_path / "wide")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        if ".experts." in name:
            torch.testing.assert_close(tensor.float(), expected[name], rtol=0.05, atol=0.02)
        else:
            assert torch.equal(tensor, expected[name].bfloat16()), name


class CallsParts(Modifier):
    """A modifier that calls a part of a decoder layer with the inputs that it saw, as AutoRound does."""

    requires_calibration_data: bool = True

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        part = find_moe_layers(state.model)[0].mlps[0].up_proj

        def call(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            seen.append((args[0].dtype, part.weight.dtype))

        self.register_hook(find_moe_layers(state.model)[0].moe, call, "forward_pre")  # type: ignore[arg-type]

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        self.remove_hooks()


seen: list[tuple[torch.dtype, torch.dtype]] = []


def test_passes_of_unknown_modifiers_keep_the_dtype(narrow: Path, log: list[str]) -> None:
    compress(narrow, [*pruning(0.3), CallsParts()])
    assert seen
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert len(messages(log)) == 1
