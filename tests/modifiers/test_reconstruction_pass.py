"""Reconstruction in ``oneshot``: what it fits, what it leaves, and that held-back tokens are not worse for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageError,
    CoverageModifier,
    LayerwiseGPTQModifier,
    load,
)
from moe_coverage_plugin.calibration import layerwise
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.core.refit import FEWEST_TOKENS
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.modeling.moe_layers import expert_width, find_moe_layers
from moe_coverage_plugin.modifiers import reconstruction_pass
from tests.modifiers.harness import (
    compress,
    flat_widths,
    logits,
    offload_to_disk,
    open_linear,
    refusal,
    save_tiny,
    widths,
)
from tests.tiny import add_tokenizer, four_bits, token_batches

pytestmark = pytest.mark.slow

TRAINED = Path(__file__).parents[2] / "benchmarks" / "testbed" / "mini_moe"
CHANNELS, BLOCK = 64, 16
SMALL = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": CHANNELS, "vocab_size": 512}
W4 = four_bits(BLOCK)


def recipe(
    reconstruct: bool = True,
    sparsity: float = 0.5,
    block_size: int = BLOCK,
    ignore: Sequence[str] = (),
    **pruning: Any,
) -> list:
    return [
        # its scores take one pass less
        AttributionModifier(channel_metric="fisher", ignore=list(ignore)),
        CoverageModifier(sparsity=sparsity),
        AlignmentModifier(block_size=block_size),
        ChannelPruningModifier(reconstruct=reconstruct, pictures=False, **pruning),
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 64 channels."""
    return add_tokenizer(save_tiny(tmp_path_factory.mktemp("source") / "small", **SMALL))


def many() -> Dataset:
    """Enough tokens to fit experts of 64 channels."""
    return token_batches(samples=32, length=48)


def reported(log: Sequence[str]) -> list[int]:
    """Numbers of experts: all projections fitted, only ``down_proj`` fitted, unchanged."""
    (line,) = (line for line in log if "Reconstruction fitted" in line)
    assert re.search("tokens held back from the fit are no better with it, or too few", line)
    return [int(number) for number in re.findall(r"\b\d+\b", line)]


def changed(one: Any, other: Any) -> dict[tuple[int, int], set[str]]:
    """For each layer and expert that both models have, the projections whose weights differ."""
    found = {}
    for index, (left, right) in enumerate(zip(find_moe_layers(one), find_moe_layers(other), strict=True)):
        for expert, (mlp, twin) in enumerate(zip(left.mlps, right.mlps, strict=True)):
            if expert_width(mlp):
                pairs: dict[str, Any] = {name: (getattr(mlp, name), getattr(twin, name)) for name in PROJECTIONS}
                found[index, expert] = {
                    name for name, (linear, same) in pairs.items() if not torch.equal(linear.weight, same.weight)
                }
    return found


# --- held-back tokens


@pytest.fixture(scope="module")
def text() -> Dataset:
    """Sixteen samples of real text."""
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    ids = tokenizer((TRAINED / "calibration.txt").read_text(encoding="utf-8")[:30_000])["input_ids"]
    samples = torch.tensor(ids[: 16 * 128]).view(16, 128)
    return Dataset.from_dict({"input_ids": samples.tolist(), "attention_mask": torch.ones_like(samples).tolist()})


def opened() -> Any:
    return linearize_moe(AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)).eval()


@pytest.fixture(scope="module")
def measured(text: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """The trained model, pruned without reconstruction, and the options of AttributionModifier for its scores.

    Two layers are enough: the second one sees what the first one has become.
    """
    path, model = tmp_path_factory.mktemp("scores") / "scores.bin", opened()
    ignore = [r"re:.*layers\.[23]\..*"]
    pruning = recipe(False, block_size=64)
    pruning[0] = AttributionModifier(channel_metric="fisher", ignore=ignore, save_scores=str(path))
    compress(model, pruning, dataset=text, batch_size=4, tokenizer=str(TRAINED))
    return model, {"scores": str(path), "ignore": ignore}


@torch.no_grad()
def routed(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs of each layer's experts, their numbers and routing weights, by hooks on the model's own forward."""
    found = []
    handles = [
        layer.experts.register_forward_pre_hook(lambda _module, args: found.append(args))
        for layer in find_moe_layers(model)
    ]
    model.model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("refit", ["down", "all"])
def test_no_experts_held_back_tokens_are_worse_than_without_reconstruction(
    text: Dataset, measured: tuple[Any, dict[str, Any]], log: list[str], refit: str
):
    """Recomputed for each expert of a trained model, with the inputs that it has in the pruned model."""
    (cut, attribution), original, fitted = measured, opened(), opened()
    pruning = [AttributionModifier(**attribution), *recipe(block_size=64, refit=refit)[1:]]
    compress(fitted, pruning, dataset=text, batch_size=4, tokenizer=str(TRAINED))
    assert widths(cut) == widths(fitted)
    held_T = (torch.arange(16) % 4 == 3).repeat_interleave(128)
    inputs = routed(fitted.eval(), torch.tensor(text["input_ids"]))
    layers = zip(*(find_moe_layers(model) for model in (original, cut, fitted)), inputs, strict=True)
    better, ratios = 0, []
    for whole, old, new, (hidden_TH, ids_TK, weights_TK) in layers:
        for expert, mlp in enumerate(new.mlps):
            if not 0 < expert_width(mlp) < 384:
                continue
            token, slot = (ids_TK == expert).nonzero(as_tuple=True)
            token, slot = token[held_T[token]], slot[held_T[token]]
            with torch.no_grad():
                target, with_fit, without = (
                    each.mlps[expert](hidden_TH[token]).double() for each in (whole, new, old)
                )
            weight_M1 = weights_TK[token, slot, None].double()
            error, before = (float((weight_M1 * (output - target)).square().sum()) for output in (with_fit, without))
            # rounding in float32
            assert error <= before * (1 + 1e-5)
            better += error < before
            ratios.append(error / before if before else 1.0)
    differ = list(changed(cut, fitted).values())
    counts = reported(log)
    assert counts == [
        sum("up_proj" in each for each in differ),
        sum(each == {"down_proj"} for each in differ),
        sum(not each for each in differ) - flat_widths(fitted).count(384),
    ]
    assert sum(counts) == len(ratios)
    # of a trained model nearly every expert is better
    assert better > 0.8 * len(ratios)
    assert sorted(ratios)[len(ratios) // 2] < 0.85
    assert (counts[0] > 0.5 * len(ratios)) == (refit == "all")


@pytest.mark.parametrize("tokens", [FEWEST_TOKENS - 1, 300])
def test_as_many_tokens_as_fit_into_memory_are_used(
    small: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], tokens: int
):
    """A float32 token takes 12 bytes for each hidden channel, and 24 for each channel of the expert."""
    of_a_token = 12 * SMALL["hidden_size"] + 24 * CHANNELS
    monkeypatch.setattr(reconstruction_pass, "REFIT_BYTES", (tokens + 0.5) * reconstruction_pass.REFITTED * of_a_token)
    sample, asked = LayerInputs.sample, []

    def recorded(inputs: LayerInputs, experts: Sequence[int], most: int) -> Any:
        asked.append(most)
        return sample(inputs, experts, most)

    monkeypatch.setattr(LayerInputs, "sample", recorded)
    compress(small, recipe(True), dataset=many())
    assert set(asked) == {tokens}
    assert (reported(log)[0] == 0) == (tokens < FEWEST_TOKENS)


def test_few_tokens_leave_the_weights_as_they_are(small: Path, log: list[str]):
    """No expert has enough tokens on both sides, so the model is that without reconstruction."""
    data = token_batches(samples=1, length=4)
    cut, fitted = (compress(small, recipe(fit), dataset=data) for fit in (False, True))
    assert not any(changed(cut, fitted).values())
    assert torch.equal(logits(cut), logits(fitted))
    pruned = [width for width in flat_widths(fitted) if 0 < width < CHANNELS]
    assert reported(log) == [0, 0, len(pruned)]
    assert FEWEST_TOKENS > 4


# --- layouts, families, places and dtypes


@pytest.fixture(scope="module", params=["ragged", "padded", "uniform"])
def cut(request: pytest.FixtureRequest, small: Path) -> tuple[str, PreTrainedModel]:
    """A layout, and the model in it without reconstruction."""
    return request.param, compress(small, recipe(False, layout=request.param), dataset=many(), batch_size=8)


@pytest.mark.parametrize("refit", ["down", "all"])
def test_layouts(small: Path, tmp_path: Path, log: list[str], cut: tuple[str, PreTrainedModel], refit: str):
    """The widths are those of the plan, padding stays zero, and the checkpoint opens as the model in memory."""
    layout, unfitted = cut
    run = {"dataset": many(), "batch_size": 8, "output_dir": str(tmp_path / "out")}
    fitted = compress(small, recipe(layout=layout, refit=refit), **run)
    assert widths(unfitted) == widths(fitted)
    differ = changed(unfitted, fitted)
    assert set().union(*differ.values()) == (set(PROJECTIONS) if refit == "all" else {"down_proj"})
    counts = reported(log)
    assert counts[0] == sum("up_proj" in each for each in differ.values())
    assert counts[1] == sum(each == {"down_proj"} for each in differ.values())
    for old, new in zip(find_moe_layers(unfitted), find_moe_layers(fitted), strict=True):
        for mlp, twin in zip(old.mlps, new.mlps, strict=True):
            if expert_width(mlp):
                zero_N = ~mlp.up_proj.weight.any(1)
                assert torch.equal(zero_N, ~twin.up_proj.weight.any(1))
                assert torch.equal(zero_N, ~twin.gate_proj.weight.any(1))
                assert not twin.down_proj.weight[:, zero_N].any()
                assert bool(zero_N.any()) <= (layout == "padded")
    ids, original = torch.tensor(many()["input_ids"]), open_linear(small)
    assert distance(fitted, original, ids) < distance(unfitted, original, ids)
    # stock transformers opens a uniform one, with its own order of sums
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(fitted), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def distance(model: Any, original: Any, ids: Tensor) -> float:
    """Of the last hidden states from those of the unpruned model."""
    output, expected = (each.eval().model(ids.to(each.device)).last_hidden_state.cpu() for each in (model, original))
    return float((output - expected).square().mean())


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss", "granitemoe"])
def test_families(tmp_path: Path, family: str):
    """With shared experts, a dense layer, biases and another activation, and hidden states that are scaled."""
    shape = {"intermediate_size": CHANNELS} if family in ("gpt_oss", "granitemoe") else {}
    source = add_tokenizer(save_tiny(tmp_path / "model", family, moe_intermediate_size=CHANNELS, **shape))
    cut, fitted = (compress(source, recipe(fit), dataset=many(), batch_size=8) for fit in (False, True))
    ids = torch.tensor(many()["input_ids"])
    assert any("up_proj" in each for each in changed(cut, fitted).values())
    assert distance(fitted, original := open_linear(source), ids) < distance(cut, original, ids)
    for one, other in zip(cut.state_dict().items(), fitted.state_dict().items(), strict=True):
        assert ".experts." in one[0] or torch.equal(one[1], other[1])


def test_an_offloaded_model(small: Path, tmp_path: Path):
    """The same weights as of the model in memory."""
    resident, model = open_linear(small), open_linear(small)
    offload_to_disk(model, tmp_path)
    for each in (resident, model):
        compress(each, recipe(), dataset=many(), batch_size=8, tokenizer=str(small))
    assert widths(model) == widths(resident)
    torch.testing.assert_close(logits(model), logits(resident), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True])
def test_a_bfloat16_model(small: Path, monkeypatch: pytest.MonkeyPatch, fast: bool):
    """On processors with and without bfloat16 instructions: fits are in float32, weights stay in bfloat16."""
    features = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": fast}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    run = {"dataset": many(), "batch_size": 8, "tokenizer": str(small)}
    cut, fitted = (compress(open_linear(small).bfloat16(), recipe(fit), **run) for fit in (False, True))
    assert all(each.dtype == torch.bfloat16 for each in fitted.parameters())
    assert set(PROJECTIONS) in changed(cut, fitted).values()
    original, ids = open_linear(small), torch.tensor(many()["input_ids"])
    assert distance(fitted.float(), original, ids) < distance(cut.float(), original, ids)


def test_fits_of_a_bfloat16_model_that_computes_in_float32(small: Path, monkeypatch: pytest.MonkeyPatch):
    """They are those of the same model in float32, rounded at the end: outputs to be reached are not rounded."""
    features = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    models = [open_linear(small).bfloat16(), open_linear(small).bfloat16().float()]
    for model in models:
        compress(model, recipe(), dataset=many(), batch_size=8, tokenizer=str(small))
    # layers after the first one see the rounded weights
    experts = [find_moe_layers(model)[0].mlps for model in models]
    compared = 0
    for mlp, wide in zip(*experts, strict=True):
        for name in PROJECTIONS if expert_width(mlp) else ():
            narrow, exact = getattr(mlp, name).weight, getattr(wide, name).weight.bfloat16()
            compared += narrow.numel()
            # all but those that the rounding of fitted columns changes, from which the refit begins
            assert float((narrow == exact).float().mean()) > 0.85
    assert compared > 0


def test_removed_experts_get_no_tokens_and_no_fit(small: Path, log: list[str]):
    model = compress(small, recipe(sparsity=0.75), dataset=many(), batch_size=8)
    flat = flat_widths(model)
    assert 0 in flat
    assert sum(reported(log)) == sum(0 < width < CHANNELS for width in flat)


@pytest.mark.parametrize("ignore", [None, ["lm_head", "re:.*self_attn.*"], ["lm_head"]])
def test_adding_outputs_of_experts_changes_no_bit(small: Path, monkeypatch: pytest.MonkeyPatch, ignore: list[str]):
    """Layers of which only experts change do not compute attention again; with its quantizer all do."""
    found: list[list[bool]] = []
    models = []
    for adds in (layerwise.DecoderStep._adds_experts, lambda _: False):
        results: list[bool] = []

        def check(step: Any, adds: Any = adds, results: list[bool] = results) -> bool:
            results.append(adds(step))
            return results[-1]

        monkeypatch.setattr(layerwise.DecoderStep, "_adds_experts", check)
        quantizer = [] if ignore is None else [LayerwiseGPTQModifier(**W4 | {"ignore": ignore})]
        models.append(compress(small, [*recipe(), *quantizer], dataset=many(), batch_size=8))
        found.append(results)
    # not of the last layer
    assert found == ([[True], [False]] if ignore != ["lm_head"] else [[], []])
    assert widths(models[0]) == widths(models[1])
    for one, other in zip(*(model.state_dict().items() for model in models), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1]), one[0]


# --- with other options


def test_a_quantizer_after_reconstruction(small: Path, tmp_path: Path):
    """It quantizes the fitted weights, and the checkpoint opens as the model in memory."""
    plain = compress(small, recipe(), dataset=many(), batch_size=8)
    quantized = compress(small, [*recipe(), QuantizationModifier(**W4)], dataset=many(), batch_size=8)
    assert widths(plain) == widths(quantized)
    assert not any(changed(plain, quantized).values()), "the weights before rounding are the fitted ones"
    expected = logits(quantized)
    assert not torch.allclose(expected, logits(plain), rtol=1e-3, atol=1e-3)
    quantized.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), expected)


def test_refit_without_reconstruction_is_an_error(pristine, tmp_path: Path):
    message = "refit='down' would do nothing with reconstruct=False of ChannelPruningModifier: leave it out, or use re"
    with pytest.raises(CoverageError, match=message):
        ChannelPruningModifier(reconstruct=False, refit="down")
    yaml = """
prune_stage:
  prune_modifiers:
    AttributionModifier: {channel_metric: fisher}
    CoverageModifier: {sparsity: 0.5}
    ChannelPruningModifier: {reconstruct: false, refit: down}
"""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml)
    assert re.search(message, refusal(pristine, str(file), tmp_path / "out"))
