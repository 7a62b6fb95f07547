"""Sources that do not fill their model stop before calibration; those that do, in any way, pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe, load_quantizable_moe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, conversion_mapping
from transformers.monkey_patching import clear_patch_mapping

from moe_coverage_plugin import AttributionModifier, ChannelPruningModifier, CoverageError, CoverageModifier
from moe_coverage_plugin.modeling.loaded_weights import RECORD, check_finite, check_loaded
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.modifiers.harness import open_linear, pruning, refusal
from tests.tiny import CONFIGS, add_tokenizer, save_model, seeing_config, token_batches

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]


def edited(source: Path, directory: Path, edit: Callable[[Tensors], Tensors | None]) -> Path:
    """A copy of a checkpoint in one file with other tensors."""
    directory.mkdir()
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    changed = edit(tensors)
    save_file(tensors if changed is None else changed, directory / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def open_by_the_toolkit(path: Path) -> PreTrainedModel:
    """By the toolkit's loader, without what it changes in the process."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
        patches.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
        try:
            with load_quantizable_moe():
                return AutoModelForCausalLM.from_pretrained(path)
        finally:
            clear_patch_mapping()


def without(pattern: str) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}
        assert len(kept) < len(tensors)
        return kept

    return edit


def other_prefix(tensors: Tensors) -> Tensors:
    return {name.replace("model.layers", "model.language_model.layers"): each for name, each in tensors.items()}


def another_layer(tensors: Tensors) -> Tensors:
    more = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    return tensors | more


def value(pattern: str, number: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = next(name for name in sorted(tensors) if re.search(pattern, name))
        tensors[name].view(-1)[tensors[name].numel() // 2] = number

    return edit


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loaded") / "model"
    return add_tokenizer(save_model(path, num_hidden_layers=2, moe_intermediate_size=128))


FAULTS = {
    "prefix": (other_prefix, r"no values for model\.layers.* and \d+ more.*model\.language_model\.layers.* instead"),
    "router": (
        without(r"layers\.1\.mlp\.gate\.weight"),
        r"no values for model\.layers\.1\.mlp\.gate\.weight of Qwen3",
    ),
    "norm": (without(r"layers\.0\.input_layernorm"), r"no values for model\.layers\.0\.input_layernorm\.weight"),
    "layer": (without(r"layers\.1\."), r"no values for model\.layers\.1\."),
    "head": (without("lm_head"), r"no values for lm_head\.weight"),
    "left over": (another_layer, r"has model\.layers\.2\..* which Qwen3MoeForCausalLM does not use"),
    "nan": (value(r"layers\.0\.self_attn\.k_proj", float("nan")), r"k_proj\.weight of .* 1 NaN or infinite values"),
    "inf": (value("embed_tokens", float("inf")), r"embed_tokens\.weight of .* has 1 NaN or infinite"),
    "expert": (value(r"experts\.3\.up_proj|experts\.gate_up", float("-inf")), r"experts\.\S+ of .* 1 NaN or infinite"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("by", ["path", "object", "linear object"])
def test_a_source_that_does_not_fill_the_model_stops(source: Path, tmp_path: Path, fault: str, by: str):
    """Field case 2.3: random or missing weights are never scored, however the model is opened."""
    edit, words = FAULTS[fault]
    path = edited(source, tmp_path / "broken", edit)
    if by == "path":
        with pytest.raises(CoverageError, match=words) as caught:
            oneshot(model=str(path), dataset=token_batches(2, 8), recipe=pruning(), output_dir=str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        assert "\n" not in str(caught.value)
        return
    model = open_linear(path) if by == "object" else open_by_the_toolkit(path)
    if fault == "nan":
        # NaN is not equal to itself, so that a comparison of weights would fail
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.nan_to_num_(nan=float("inf"))
    assert re.search(words, refusal(model, pruning(), tmp_path / "out"))


def test_an_expert_that_is_missing(source: Path, tmp_path: Path):
    """Field case 2.3: if experts are opened one by one, nothing else notices."""
    path = edited(source, tmp_path / "broken", without(r"layers\.0\.mlp\.experts\.3\.up_proj"))
    message = refusal(open_by_the_toolkit(path), pruning(), tmp_path / "out")
    assert re.search(r"no values for model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight", message)


def test_shapes_that_were_ignored(source: Path, tmp_path: Path):
    """Field case 2.3: ``ignore_mismatched_sizes`` leaves random weights, too."""
    model = linearize_moe(AutoModelForCausalLM.from_pretrained(source, ignore_mismatched_sizes=True, vocab_size=600))
    message = refusal(model, pruning(), tmp_path / "out")
    assert re.search(r"no values for lm_head\.weight, model\.embed_tokens\.weight of", message)


def test_fewer_layers_than_the_source(source: Path, tmp_path: Path):
    """Field case 2.3: a layer of the source that the model does not have would be left out silently."""
    model = linearize_moe(AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=1))
    assert re.search(r"has model\.layers\.1\..*does not use", refusal(model, pruning(), tmp_path))


def test_a_shard_that_is_missing(source: Path, tmp_path: Path):
    """Field case 2.3: transformers stops itself."""
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "shards", max_shard_size="500KB")
    next(iter(sorted((tmp_path / "shards").glob("*.safetensors")))).unlink()
    with pytest.raises(Exception, match="safetensors"):
        oneshot(model=str(tmp_path / "shards"), dataset=token_batches(2, 8), recipe=pruning())


def test_a_model_opened_before_this_package_was_imported(source: Path, tmp_path: Path):
    """Field case 2.3: without a record, routers are checked by the marks of transformers."""
    path = edited(source, tmp_path / "broken", without(r"layers\.1\.mlp\.gate\.weight"))
    for file, passes in ((source, True), (path, False)):
        model = open_linear(file)
        delattr(model, RECORD)
        routers = [layer.router for layer in find_moe_layers(model)]
        if passes:
            check_loaded(model, routers)
        else:
            with pytest.raises(CoverageError, match=r"no values for model\.layers\.1\.mlp\.gate\.weight"):
                check_loaded(model, routers)


def test_conversions_that_the_loader_of_the_toolkit_left_behind(source: Path):
    """Its loader changes how the process reads a family, so that a second model gets random experts."""
    with pytest.MonkeyPatch.context() as patches:
        cache = conversion_mapping._build_checkpoint_conversion_mapping()
        patches.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", cache | {"qwen3_moe": []})
        patches.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", {"qwen3_moe"})
        model = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(CoverageError, match=r"no values for .*experts.*: open it in another process, because"):
        check_loaded(model)


# --- no false alarms


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_passes(tmp_path: Path, family: str):
    """Field case 2.3: tied heads, buffers, conversions and MTP settings are no faults."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model", family))
    assert hasattr(model, RECORD)
    check_loaded(model)
    check_finite(model)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_heads_and_mtp_tensors_pass(tmp_path: Path, tied: bool):
    """Field case 2.3: transformers leaves MTP tensors out by design, under either kind of name."""
    source = save_model(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=1, tie_word_embeddings=tied)

    def add_mtp(tensors: Tensors) -> Tensors:
        layer = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
        return tensors | layer | {"model.layers.3.eh_proj.weight": torch.ones(4, 4), "mtp.fc.weight": torch.ones(2, 2)}

    check_loaded(AutoModelForCausalLM.from_pretrained(edited(source, tmp_path / "mtp", add_mtp)))
    # without the count of such layers it is a layer that is left over
    config = json.loads((tmp_path / "mtp" / "config.json").read_text())
    (tmp_path / "mtp" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CoverageError, match=r"has model\.layers\.3\..*does not use"):
        check_loaded(AutoModelForCausalLM.from_pretrained(tmp_path / "mtp"))


def test_a_nested_model_passes(tmp_path: Path):
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(seeing_config()).save_pretrained(tmp_path / "model")
    check_loaded(AutoModelForImageTextToText.from_pretrained(tmp_path / "model"))


def test_models_made_from_a_config_pass(tmp_path: Path):
    """Field case 2.3: random weights on purpose are no fault, and have no name or path."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"](num_hidden_layers=1))
    recipe: list[Any] = [
        AttributionModifier(channel_metric="activation"),
        CoverageModifier(sparsity=0.5),
        ChannelPruningModifier(reconstruct=False, pictures=False),
    ]
    model.config._name_or_path = str(add_tokenizer(save_model(tmp_path / "named", num_hidden_layers=1)))
    oneshot(model=model, dataset=token_batches(2, 8), recipe=recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_large_finite_values_pass(dtype: torch.dtype, source: Path):
    model = AutoModelForCausalLM.from_pretrained(source).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.finfo(dtype).max)
    check_finite(model)
