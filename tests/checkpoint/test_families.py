"""Checkpoints of every family, in load() and in stock transformers, which loads some and stops at the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modeling.moe.conversion_mappings import get_linearize_load_mappings
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.checkpoint.expert_names import stores_single_experts
from moe_coverage_plugin.checkpoint.saving import PruningRecord, save_with_manifest
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import remove_expert
from tests.checkpoint.runs import SPARSITY, W4, aligned, logits, prompt, prune, source, tensors
from tests.tiny import CONFIGS, LISTED, add_tokenizer, save_model, seeing_config

pytestmark = pytest.mark.slow

# names of an expert's projections in published checkpoints; other families: gate_proj, up_proj, down_proj
FAMILY_NAMES = {"mixtral": {"w1", "w2", "w3"}, "minimax_m2": {"w1", "w2", "w3"}}
FAMILIES = tuple(CONFIGS)
# their published checkpoints store all experts in one tensor, so stock engines find no expert of ours
MERGED_ON_DISK = ("granitemoe", "gpt_oss")
SINGLE_ON_DISK = tuple(family for family in FAMILIES if family not in MERGED_ON_DISK)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {family: source(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(sources, tmp_path_factory):
    """For each family and layout: the checkpoint, and the logits of the model in memory."""
    root, found = tmp_path_factory.mktemp("pruned"), {}
    for family, path in sources.items():
        for layout in ("ragged", "padded"):
            output = root / f"{family}_{layout}"
            model = prune(path, output, layout, sparsity=SPARSITY.get(family, 0.4), min_width=0)
            found[family, layout] = output, logits(model)
    for layout in ("ragged", "padded"):
        output = root / f"w4a16_{layout}"
        model = prune(sources["qwen3_moe"], output, layout, quantize=True)
        found["w4a16", layout] = output, logits(model)
    for family in ("mixtral", *MERGED_ON_DISK):
        output = root / f"w4a16_{family}"
        model = prune(sources[family], output, quantize=True, min_width=0)
        found[f"w4a16_{family}", "ragged"] = output, logits(model)
    output = root / "w4a16_granitemoe_padded"
    model = prune(sources["granitemoe"], output, "padded", quantize=True)
    found["w4a16_granitemoe", "padded"] = output, logits(model)
    output = root / "uniform"
    model = prune(sources["qwen3_moe"], output, "uniform")
    found["qwen3_moe", "uniform"] = output, logits(model)
    for name, quantizers in (("one_width", []), ("one_width_w4a16", [QuantizationModifier(**W4)])):
        output = root / name
        model = one_width_with_removed_experts(sources["qwen3_moe"])
        oneshot(model=model, recipe=quantizers, output_dir=str(output))
        found[name, "ragged"] = output, logits(model)
    return found


def one_width_with_removed_experts(path: Path):
    """The hardest case for stock loaders: all tensors have the same width, and some experts are missing."""
    model = AutoModelForCausalLM.from_pretrained(path)
    linearize_moe(model)
    widths = set()
    for layer in find_moe_layers(model):
        remove_expert(layer, 2)
        remove_expert(layer, 7)
        mask_router(layer)
        widths |= set(layer.widths)
    assert widths == {0, 128}
    modify_save_pretrained(model)
    save_with_manifest(model, PruningRecord("ragged", 128, 32, {}))
    return model


@pytest.fixture(scope="module")
def stock(runs):
    """Logits or errors of transformers in a process that does not import the plugin."""
    paths = [str(path) for path, _ in runs.values()]
    script = Path(__file__).parent / "stock.py"
    done = subprocess.run(
        [sys.executable, str(script), *paths],
        input=json.dumps(prompt().tolist()),
        capture_output=True,
        text=True,
        check=False,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    return {key: results[str(path)] for key, (path, _) in runs.items()}


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_equals_the_model_in_memory(runs, family, layout):
    """Case 13: the checkpoint of every family is compared by its logits; that it loads is not enough."""
    path, expected = runs[family, layout]
    assert torch.equal(logits(aligned(load(path))), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_is_ragged(runs, family):
    manifest = Manifest.from_checkpoint(runs[family, "ragged"][0])
    assert manifest is not None
    assert len(manifest.distinct_widths) > 1


FOUR_BITS = ["w4a16", "w4a16_mixtral", *(f"w4a16_{family}" for family in MERGED_ON_DISK), "one_width_w4a16"]


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_are_decompressed_to_the_weights_in_memory(runs, name):
    path, expected = runs[name, "ragged"]
    # the model in memory decompresses in every forward pass, to the same values
    torch.testing.assert_close(logits(load(path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_the_names_of_their_family(runs, family):
    """Case 20, case 24: experts are stored one by one, under the names of the family, such as w1, w2 and w3."""
    names = {name.split(".")[-2] for name in tensors(runs[family, "ragged"][0]) if ".experts." in name}
    assert names == FAMILY_NAMES.get(family, {"gate_proj", "up_proj", "down_proj"})


RAGGED = [*FAMILIES, *FOUR_BITS, "one_width"]
PADDED_BY_ONE = [*MERGED_ON_DISK, "w4a16_granitemoe"]


@pytest.mark.parametrize("key", [*((name, "ragged") for name in RAGGED), *((n, "padded") for n in PADDED_BY_ONE)])
def test_stock_transformers_stops_at_what_it_cannot_load(stock, key):
    """Case 20, case 21: without the plugin there is an error, and no model with random or narrowed experts.

    For families that merge experts, transformers does not look for the experts of our checkpoints at all.
    """
    assert "error" in stock[key], f"it was opened, without {stock[key].get('loading_info')}"
    # field case 2.18: the error says what is missing
    assert "moe_coverage_plugin.load" in stock[key]["error"].splitlines()[-1]


@pytest.mark.parametrize("key", [*((family, "padded") for family in SINGLE_ON_DISK), ("qwen3_moe", "uniform")])
def test_stock_transformers_loads_one_width(stock, runs, key):
    assert "logits" in stock[key], stock[key]
    assert not stock[key]["loading_info"]
    found = torch.tensor(stock[key]["logits"])
    # stock transformers multiplies all experts in one kernel
    torch.testing.assert_close(found, runs[key][1].flatten(), rtol=1e-4, atol=1e-4)


def test_stock_transformers_loads_four_bits_of_one_width(stock, runs):
    """Or transformers stops, since it must decompress experts one by one and merge them."""
    found = stock["w4a16", "padded"]
    if "error" not in found:
        torch.testing.assert_close(
            torch.tensor(found["logits"]), runs["w4a16", "padded"][1].flatten(), rtol=1e-3, atol=1e-3
        )


def test_after_the_loader_of_the_toolkit(runs, tmp_path):
    """``load_quantizable_moe`` replaces the conversions of the family by renamings, for the entire process."""
    registered = get_checkpoint_conversion_mapping("qwen3_moe")
    _, _, renamings = get_linearize_load_mappings("qwen3_moe")
    register_checkpoint_conversion_mapping("qwen3_moe", renamings, overwrite=True)
    try:
        model = load(runs["w4a16", "ragged"][0])
        assert stores_single_experts(model)
        oneshot(model=model, recipe=[QuantizationModifier(**W4)], output_dir=str(tmp_path / "out"))
    finally:
        register_checkpoint_conversion_mapping("qwen3_moe", registered, overwrite=True)
    assert tensors(tmp_path / "out").keys() == tensors(runs["w4a16", "ragged"][0]).keys()
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", [False, True], ids=["16 bit", "W4A16"])
def test_text_part_of_a_multimodal_model(tmp_path, quantize):
    """The language model is nested in the model and in the config, and its experts are stored in one tensor."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(seeing_config(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "in")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(add_tokenizer(tmp_path / "in"))
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path / "in")
    pruned = prune(opened, tmp_path / "out", quantize=quantize, processor=tokenizer)
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert len(manifest.widths) == 3
    assert all(name.startswith("model.language_model.layers.") for name in manifest.widths)
    assert manifest.removed_experts
    tolerance = 1e-4 if quantize else 0.0
    found = logits(aligned(load(tmp_path / "out")))
    torch.testing.assert_close(found, logits(pruned), rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match=r"moe_coverage_plugin\.load"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("quantize", [False, True], ids=["16 bit", "W4A16"])
@pytest.mark.parametrize("factory", [AutoModelForImageTextToText, AutoModelForCausalLM], ids=["multimodal", "text"])
def test_multimodal_model_and_its_text_part(tmp_path, factory, quantize):
    """A family with a class for each: checkpoints of both have the config and names of the multimodal model."""
    torch.manual_seed(0)
    config = seeing_config("qwen3_5_moe", num_hidden_layers=2, moe_intermediate_size=128)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "in")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(add_tokenizer(tmp_path / "in"))
    opened = factory.from_pretrained(tmp_path / "in")
    pruned = prune(opened, tmp_path / "out", quantize=quantize, min_width=0, processor=tokenizer)
    model = load(tmp_path / "out")
    assert type(model) is type(pruned)
    torch.testing.assert_close(logits(model), logits(pruned), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(load(tmp_path / "again")), logits(model), rtol=1e-4, atol=1e-4)
    layers = [name for directory in ("out", "again") for name in tensors(tmp_path / directory) if ".layers." in name]
    assert layers
    assert all(name.startswith("model.language_model.layers.") for name in layers)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """Checkpoints of a family with its own code and experts in a list, and the logits of the models in memory."""
    root, found = tmp_path_factory.mktemp("listed"), {}
    own = add_tokenizer(save_model(root / "in", LISTED, num_hidden_layers=3, moe_intermediate_size=128))
    for name, options in {"ragged": {}, "padded": {"layout": "padded"}, "w4a16": {"quantize": True}}.items():
        model = AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True)
        pruned = prune(model, root / name, min_width=0, trust_remote_code_model=True, **options)
        found[name] = root / name, logits(pruned)
    return found


@pytest.mark.parametrize("name", ["ragged", "padded", "w4a16"])
def test_experts_in_a_list_load_with_code_that_is_trusted(listed, name):
    path, expected = listed[name]
    with pytest.raises(CoverageError, match="custom code"):
        load(path)
    model = load(path, trust_remote_code=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    manifest = Manifest.from_checkpoint(path)
    assert manifest is not None
    assert list(manifest.widths) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert manifest.removed_experts or name == "padded"


def test_experts_in_a_list_can_be_quantized_later(listed, tmp_path):
    model = load(listed["ragged"][0], trust_remote_code=True)
    recipe = [QuantizationModifier(**W4)]
    oneshot(model=model, recipe=recipe, output_dir=str(tmp_path / "out"), trust_remote_code_model=True)
    assert tensors(tmp_path / "out").keys() == tensors(listed["w4a16"][0]).keys()
    found = logits(load(tmp_path / "out", trust_remote_code=True))
    torch.testing.assert_close(found, listed["w4a16"][1], rtol=1e-4, atol=1e-4)


def test_stock_transformers_and_experts_in_a_list(listed):
    """With code that is trusted: padded experts load, and ragged ones stop."""

    def opened(name):
        return AutoModelForCausalLM.from_pretrained(listed[name][0], trust_remote_code=True, output_loading_info=True)

    model, info = opened("padded")
    assert not any(info.values())
    torch.testing.assert_close(logits(model), listed["padded"][1], rtol=1e-4, atol=1e-4)
    for name in ("ragged", "w4a16"):
        with pytest.raises(ValueError, match=r"moe_coverage_plugin\.load"):
            opened(name)
