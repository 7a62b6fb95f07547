"""Mistakes stop a run with one sentence, before anything is calibrated, changed or written."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from llmcompressor.core import LifecycleCallbacks, active_session, reset_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import (
    AlignmentModifier,
    AttributionModifier,
    ChannelPruningModifier,
    CoverageError,
    CoverageModifier,
    LayerwiseGPTQModifier,
    load,
)
from moe_coverage_plugin.manifest import REPORT_NAME
from tests import paper_method
from tests.modifiers.harness import (
    BLOCK,
    CHANNELS,
    TOP_K,
    W4_GROUP_64,
    compress,
    open_linear,
    pruning,
    refusal,
    save_tiny,
    widths,
)
from tests.tiny import COMMON, add_tokenizer, token_batches

pytestmark = pytest.mark.slow

QUANTIZERS = [GPTQModifier, QuantizationModifier]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "out"


# --- order of the recipe


@pytest.mark.parametrize("missing", [AttributionModifier, CoverageModifier])
def test_missing_predecessor(pristine: PreTrainedModel, output: Path, missing: type):
    recipe = [modifier for modifier in pruning() if not isinstance(modifier, missing)]
    assert re.search(
        rf"needs {missing.__name__} before it.*is missing: the order is", refusal(pristine, recipe, output)
    )


def test_alignment_needs_coverage(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, [AttributionModifier(), AlignmentModifier()], output)
    assert "AlignmentModifier needs CoverageModifier before it" in message


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_wrong_order(pristine: PreTrainedModel, output: Path, order: tuple[int, ...]):
    recipe = pruning()
    message = refusal(pristine, [recipe[index] for index in order], output)
    assert re.search("needs .* before it in the recipe, which comes after it: the order is Attribution", message)


def test_alignment_after_pruning_would_do_nothing(pristine: PreTrainedModel, output: Path):
    attribution, coverage, alignment, channel_pruning = pruning()
    message = refusal(pristine, [attribution, coverage, channel_pruning, alignment], output)
    assert "AlignmentModifier is after ChannelPruningModifier" in message


def test_pruning_twice(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, [*pruning(), ChannelPruningModifier()], output)
    assert "two ChannelPruningModifier" in message


@pytest.mark.parametrize(
    ("order", "idle"),
    [
        ("AcaCP", "CoverageModifier and AlignmentModifier"),
        ("ACcaP", "CoverageModifier"),
        ("AcaaP", "AlignmentModifier"),
        ("AcAcP", "CoverageModifier"),
    ],
)
def test_plans_that_no_modifier_uses(pristine: PreTrainedModel, output: Path, order: str, idle: str):
    """Only the last plan would be used, and the other one was written for some purpose."""
    made = {
        "A": AttributionModifier,
        "c": lambda: CoverageModifier(sparsity=0.25),
        "C": lambda: CoverageModifier(sparsity=0.5),
        "a": lambda: AlignmentModifier(block_size=BLOCK),
        "P": ChannelPruningModifier,
    }
    message = refusal(pristine, [made[letter]() for letter in order], output)
    assert re.search(rf"plan of {idle}, .*ChannelPruningModifier uses .*remove", message)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("position", range(4))
def test_quantizer_before_pruning(source: Path, output: Path, quantizer: type, position: int):
    recipe = pruning()
    recipe.insert(position, quantizer(**W4_GROUP_64))
    message = refusal(source, recipe, output)  # quantizers add scales when they initialize: a model of its own
    assert re.search(rf"{quantizer.__name__} is before .*prune first, then quantize", message)


def test_reap_after_pruning(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, [*pruning(), REAPPruningModifier(sparsity=0.25)], output)
    assert re.search("REAPPruningModifier is after .*put it before AttributionModifier", message)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_reap_amid_our_modifiers(pristine: PreTrainedModel, output: Path, position: int):
    recipe = pruning()
    recipe.insert(position, REAPPruningModifier(sparsity=0.25))
    assert "put it before AttributionModifier" in refusal(pristine, recipe, output)


# --- calibration passes


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_shared_pass_with_a_quantizer(pristine: PreTrainedModel, output: Path, quantizer: type, pipeline: str):
    message = refusal(pristine, [*pruning(), quantizer(**W4_GROUP_64)], output, pipeline=pipeline)
    assert re.search(rf"one calibration pass with {quantizer.__name__}.*pipeline=\"independent\"", message)


def test_matrices_larger_than_the_memory(pristine: PreTrainedModel, output: Path, monkeypatch: pytest.MonkeyPatch):
    free = namedtuple("Memory", ["available"])(2**10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    message = refusal(pristine, [AttributionModifier(channel_metric="obs"), *pruning()[1:]], output)
    assert re.search(r"channel_metric='obs' keeps \S+ GiB .* 9\.5e-07 GiB are free: choose 'fisher'", message)


def test_pass_without_data(pristine: PreTrainedModel, output: Path):
    assert re.search(
        "pipeline='datafree'.*pipeline=\"independent\"", refusal(pristine, pruning(), output, pipeline="datafree")
    )


def test_shared_pass_of_a_session_driven_by_hand(source: Path):
    model = open_linear(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reset_session()
    active_session().initialize(
        model=model,
        recipe=[*pruning(), GPTQModifier(**W4_GROUP_64)],
        calib_data=[{"input_ids": torch.ones(1, 8, dtype=torch.int64)}],
        start=-1,
    )
    with pytest.raises(CoverageError, match="shares one calibration pass with GPTQModifier"):
        LifecycleCallbacks.calibration_start()
    reset_session()
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_shared_pass_of_our_modifiers_alone_gives_the_same_widths(source: Path):
    assert widths(compress(source, pruning(), pipeline="sequential")) == widths(compress(source, pruning()))


# --- budgets and blocks


@pytest.mark.parametrize("block_size", [None, BLOCK])
def test_budget_below_top_k_names_a_sparsity_that_works(source: Path, output: Path, block_size: int | None):
    message = refusal(open_linear(source), pruning(0.9999, block_size), output)
    assert re.search("sparsity=0.9999 leaves 0 of 4096 expert channels.* 2 experts need at least", message)
    named = float(re.findall(r"for instance to (\S+),", message)[0])
    kept = widths(compress(source, pruning(named, block_size)))
    assert all(sum(width > 0 for width in layer) >= TOP_K for layer in kept)


@pytest.mark.parametrize("block_size", [48, 512])
def test_block_size_that_does_not_divide(pristine: PreTrainedModel, output: Path, block_size: int):
    message = refusal(pristine, pruning(block_size=block_size), output)
    assert re.search(
        rf"block size {block_size} does not divide the {CHANNELS} channels.*choose one of 1, 2, 4", message
    )


def test_min_width_above_the_expert_width(pristine: PreTrainedModel, output: Path):
    attribution, coverage, _, channel_pruning = pruning()
    alignment = AlignmentModifier(block_size=BLOCK, min_width=CHANNELS + BLOCK, **paper_method.ALIGNMENT)
    message = refusal(pristine, [attribution, coverage, alignment, channel_pruning], output)
    assert re.search(r"min_width=320 is above the expert width 256.*lower it", message)


def test_uniform_layout_if_shared_experts_have_the_width_of_routed_ones(tmp_path: Path, output: Path):
    model = open_linear(add_tokenizer(save_tiny(tmp_path / "glm4_moe", "glm4_moe")))
    message = refusal(model, pruning(0.25, layout="uniform"), output)
    assert re.search(
        "layout='uniform'.*Glm4MoeForCausalLM also takes the size of its shared experts.*'ragged'", message
    )


def test_uniform_layout_below_one_block(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, pruning(0.8, layout="uniform"), output)
    assert re.search(
        "layout='uniform' with sparsity=0.8 would give every expert less than one block of 64 channels: lower",
        message,
    )


@pytest.mark.parametrize("layout", ["padded", "uniform"])
def test_one_width_for_all_and_layers_left_unpruned(pristine: PreTrainedModel, output: Path, layout: str):
    """Case 28: one width for the model contradicts layers that keep theirs."""
    message = refusal(pristine, pruning(layout=layout, ignore=["model.layers.0"]), output)
    assert re.search(f"layout='{layout}'.*ignore.*layout='ragged'", message)


# --- quantizers


def quantizer_of(group_size: int | None = None, targets: str = "Linear", ignore: tuple[str, ...] = ("lm_head",)):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size or 64}
    group = {"targets": [targets], "weights": weights}
    return QuantizationModifier(config_groups={"group_0": group}, ignore=list(ignore))


def test_scheme_with_larger_groups_than_blocks(pristine: PreTrainedModel, output: Path):
    quantizer = QuantizationModifier(targets=["Linear"], scheme="W4A16", ignore=["lm_head"])
    message = refusal(pristine, [*pruning(block_size=64), quantizer], output)
    assert re.search(r"group_size 128 but widths will be multiples of 64.*multiple of 128.*divides 64", message)


def test_groups_without_alignment(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, [*pruning(block_size=None), quantizer_of(64)], output)
    assert re.search(r"group_size 64 but widths will be multiples of 1: give an AlignmentModifier", message)


def test_groups_that_do_not_divide_the_hidden_size(tmp_path: Path, output: Path):
    source = save_tiny(tmp_path / "model", hidden_size=96)
    message = refusal(source, [*pruning(), quantizer_of(64)], output)
    assert re.search("group_size 64, which does not divide the hidden size 96: .*32", message)


@pytest.mark.parametrize("channels", [336, 344])
def test_groups_that_do_not_divide_a_dense_layer(tmp_path: Path, output: Path, channels: int):
    """Case 5: a dense first layer has another width, and the error names it before the quantizer runs.

    336 and 344 are not multiples of 64, as the 10944 of real models is not a multiple of 128.
    """
    source = add_tokenizer(save_tiny(tmp_path / "model", "glm4_moe", intermediate_size=channels))
    message = refusal(source, [*pruning(), quantizer_of(64)], output)
    assert re.search(
        rf"group_size 64, .* {channels} input channels of model\.layers\.0\.mlp\.down_proj: .* add .* ignore", message
    )
    named = re.findall(r'add "(\S+)" to', message)[0]
    compress(open_linear(source), [*pruning(), quantizer_of(64, ignore=("lm_head", named))])


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("target", ["re:.*self_attn.*", r"re:.*layers\.0\.mlp\.experts.*", "re:.*expert.*w1$"])
def test_targets_that_leave_experts_out(pristine: PreTrainedModel, output: Path, quantizer: type, target: str):
    """Case 22: without this check, targets that match no expert leave nearly all weights in 16 bits silently."""
    group = W4_GROUP_64["config_groups"]["group_0"] | {"targets": ["re:.*q_proj$", target]}
    recipe = [*pruning(), quantizer(config_groups={"group_0": group}, ignore=["lm_head"])]
    message = refusal(pristine, recipe, output)
    assert re.search(
        r"leave all 24 expert projections of model\.layers\.\d\.mlp\.experts in 16 bits.*add Linear", message
    )


def test_experts_may_be_left_out_explicitly(source: Path):
    """Case 22: targets may match no expert if ignore names the experts, or another quantizer takes them."""
    weights = W4_GROUP_64["config_groups"]["group_0"]
    attention = {"config_groups": {"group_0": weights | {"targets": ["re:.*self_attn.*_proj$"]}}}
    compress(source, [*pruning(), QuantizationModifier(**attention, ignore=["re:.*experts.*"])])
    experts = {"config_groups": {"group_0": weights | {"targets": ["re:.*experts.*_proj$"]}}}
    compress(source, [*pruning(), QuantizationModifier(**attention), QuantizationModifier(**experts)])


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("re:.*down_proj$", "16 of 24"),
        (r"re:.*layers\.1\..*experts\.3\..*", "21 of 24"),
        (r"re:.*layers\.0\.mlp\.experts\.0\.up_proj$", "23 of 24"),
    ],
)
def test_ignore_that_hits_part_of_a_layer(pristine: PreTrainedModel, output: Path, pattern: str, hit: str):
    """Case 10, case 11: an ignore list that hits part of a layer's experts would mix schemes in it."""
    message = refusal(pristine, [*pruning(), quantizer_of(ignore=("lm_head", pattern))], output)
    assert re.search(
        rf"quantizes {hit} expert projections of model\.layers\.\d\.mlp\.experts.*all of them or none", message
    )


def test_unpruned_layers_are_checked_too(shared_expert_source: Path, output: Path):
    """Case 9, case 11: the rules for quantizers also hold for layers that are left unpruned."""
    model = open_linear(shared_expert_source)
    routes = quantizer_of(ignore=("lm_head", r"re:.*layers\.1\..*shared_expert_gate$"))
    message = refusal(model, [*pruning(ignore=["model.layers.0"]), routes], output)
    assert "would quantize model.layers.0.mlp.shared_expert_gate" in message
    partly = quantizer_of(ignore=("lm_head", "re:.*shared_expert_gate$", r"re:.*layers\.0\..*experts\.2\..*"))
    message = refusal(model, [*pruning(ignore=["model.layers.0"]), partly], output)
    assert "quantizes 21 of 24 expert projections of model.layers.0.mlp.experts" in message


def test_quantizer_that_touches_the_shared_gate(shared_expert_source: Path, output: Path):
    """Case 9: the gate of shared experts is never quantized, and the error says how to leave it out."""
    model = open_linear(shared_expert_source)
    message = refusal(model, [*pruning(), quantizer_of(64)], output)
    assert re.search(r'would quantize model\.layers\.0\.mlp\.shared_expert_gate.*add "(\S+)" to its ignore', message)
    named = re.findall(r'add "(\S+)" to', message)[0]
    compress(model, [*pruning(), quantizer_of(64, ignore=("lm_head", named))])


def test_quantizer_that_touches_a_router(pristine: PreTrainedModel, output: Path):
    """Case 9, case 15: a router is never quantized."""
    quantizer = quantizer_of(targets=r"re:.*mlp\.gate$")
    message = refusal(pristine, [*pruning(), quantizer], output)
    assert re.search(r"would quantize model\.layers\.0\.mlp\.gate, which decides routing: add", message)


def test_quantized_model(source: Path, output: Path):
    model = compress(source, QuantizationModifier(**W4_GROUP_64))
    message = refusal(model, pruning(), output)
    assert re.search(r"model\.layers\.0\.mlp\.experts is quantized already: prune the 16-bit model", message)


# --- data and model


def test_no_dataset(pristine: PreTrainedModel, output: Path):
    """Case 31: without calibration data all scores would be zero, so nothing is pruned."""
    assert re.search("calibration set is empty.*dataset=", refusal(pristine, pruning(), output, dataset=None))


def test_empty_dataset(pristine: PreTrainedModel, output: Path):
    """Case 31: an empty calibration set prunes nothing."""
    empty = token_batches(samples=1).select([])
    assert "the data set has 0 rows" in refusal(pristine, pruning(), output, dataset=empty)


def test_samples_without_tokens(pristine: PreTrainedModel, output: Path):
    loader = torch.utils.data.DataLoader([{"input_ids": torch.zeros(0, dtype=torch.int64)}])
    assert "has no input_ids" in refusal(pristine, pruning(), output, dataset=loader)


@pytest.mark.parametrize("silent", ["labels", "length"])
@pytest.mark.parametrize(
    ("attribution", "option"),
    [
        ({"channel_metric": "fisher"}, "channel_metric='fisher'"),
        ({"channel_metric": "activation", "expert_importance": "nll_squared"}, "expert_importance='nll_squared'"),
        ({"channel_metric": "activation", "layer_noise": 0.5}, "layer_noise=0.5"),
    ],
)
def test_no_token_to_predict(
    pristine: PreTrainedModel, output: Path, silent: str, attribution: dict[str, Any], option: str
):
    """Case 31: gradients of no loss are zero, which would prune at random."""
    data = token_batches(samples=4, length=1 if silent == "length" else 8)
    if silent == "labels":
        data = data.add_column("labels", [[-100] * 8] * 4)
    recipe = [AttributionModifier(**attribution), *pruning()[1:]]
    message = refusal(pristine, recipe, output, dataset=data)
    assert re.search(rf"no token .* to predict.*{option}.*label.*-100", message)


def test_no_token_to_predict_matters_only_if_a_loss_is_measured(source: Path):
    recipe = [AttributionModifier(channel_metric="activation"), *pruning(0.25, None)[1:]]
    compress(source, recipe, dataset=token_batches(samples=4, length=1))


def test_no_token_to_predict_in_the_batches_that_measure_layers(pristine: PreTrainedModel, output: Path):
    """Case 31: layers are measured by the first batches only, which may predict no token although others do."""
    labels = [[-100] * 8 if row < 2 else [5] * 8 for row in range(4)]
    data = token_batches(samples=4, length=8).add_column("labels", labels)
    recipe = [AttributionModifier(layer_batches=2, **paper_method.ATTRIBUTION), *pruning()[1:]]
    message = refusal(pristine, recipe, output, dataset=data)
    assert re.search(r"first 2 .*no token .* to predict.*layer_noise=1.0.*layer_batches", message)


def test_model_without_experts(tmp_path: Path, output: Path):
    config = transformers.Qwen3Config(**COMMON | {"num_hidden_layers": 1, "intermediate_size": 128, "head_dim": 32})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    message = refusal(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), pruning(), output)
    assert "Qwen3ForCausalLM has no mixture-of-experts layer" in message


def test_ignore_that_leaves_nothing(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, pruning(ignore=["re:.*experts$"]), output)
    assert re.search("leaves none of 2 MoE layers to prune: shorten it", message)


def test_ignore_that_matches_nothing(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, pruning(ignore=["model.layers.7"]), output)
    assert re.search(r"'model\.layers\.7' matches no MoE layer, the layers are model\.layers\.0\.mlp", message)


@pytest.mark.parametrize("layout", ["ragged", "padded", "uniform"])
@pytest.mark.parametrize("reopened", [False, True])
def test_model_pruned_before(source: Path, tmp_path: Path, output: Path, layout: str, reopened: bool):
    """Equal widths do not tell that a model is unpruned, and its card would show only what the second run removed."""
    model = compress(source, pruning(layout=layout), output_dir=str(tmp_path / "first"))
    if reopened:
        (tmp_path / "first" / REPORT_NAME).unlink()
        model = load(tmp_path / "first")
    assert re.search("a model that was pruned before.*prune the original model", refusal(model, pruning(), output))


def test_model_of_equal_widths_pruned_in_two_runs_and_then_again(source: Path, output: Path):
    """The record of the last run names only the layers that it pruned."""
    even = {"sparsity": 0.5, "block_size": None, "intra_layer": "uniform"}
    first = compress(source, pruning(ignore=["model.layers.0"], **even))
    model = compress(first, pruning(ignore=["model.layers.1"], **even))
    assert {width for layer in widths(model) for width in layer} == {CHANNELS // 2}
    message = refusal(model, pruning(ignore=["model.layers.0"]), output)
    assert re.search(r"layers\.1\.mlp\.experts.*a model that was pruned before.*prune the original model", message)


# --- output


def test_output_has_another_model(pristine: PreTrainedModel, tmp_path: Path):
    """Field case 2.5: found before calibration."""
    (tmp_path / "config.json").write_text("{}")
    message = refusal(pristine, pruning(), tmp_path)
    assert re.search(r"has weights or a config that are not of this model \(config.json\): choose another", message)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_output_below_a_file(pristine: PreTrainedModel, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    message = refusal(pristine, pruning(), tmp_path / "file" / "out")
    assert re.search(r"out cannot be created: \S+/file is not .*, choose another", message)


def test_output_is_a_file(pristine: PreTrainedModel, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    assert "is not a directory: choose another" in refusal(pristine, pruning(), tmp_path / "file")


def test_scores_saved_into_the_output(pristine: PreTrainedModel, tmp_path: Path, monkeypatch):
    """Engines would load the scores as weights; the checkpoint has a copy in a subfolder."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    name = "scores.safetensors"
    for path in (f"out/{name}", str(tmp_path / "out" / name), f"out/../out/{name}"):
        recipe = [AttributionModifier(save_scores=path, **paper_method.ATTRIBUTION), *pruning()[1:]]
        message = refusal(pristine, recipe, tmp_path / "out")
        assert re.search(r"save_scores=\S+scores.safetensors is in the output \S+out, .* beside", message)


def test_disk_too_small(pristine: PreTrainedModel, output: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**12, 10**12 - 1000, 1000))
    assert re.search("needs about .* free: make room", refusal(pristine, pruning(), output))


# --- options


def test_loss_prior_without_measured_loss(pristine: PreTrainedModel, output: Path):
    recipe = [AttributionModifier(), *pruning(inter_layer="coverage")[1:]]
    assert re.search("inter_layer='coverage'.*layer_noise=None.*set.*layer_prior", refusal(pristine, recipe, output))
    recipe = [AttributionModifier(), *pruning(inter_layer="loss")[1:]]
    assert re.search("inter_layer='loss'.*layer_noise=None.*set", refusal(pristine, recipe, output))


def test_unknown_recipe_args(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, pruning(), output, recipe_args={"sparsty": 0.3, "sparsity": 0.3})
    assert re.search("recipe_args sparsty override nothing.*did you mean sparsity", message)
    recipe = [*pruning(), LayerwiseGPTQModifier(targets=["Linear"], scheme="W4A16")]
    message = refusal(pristine, recipe, output, recipe_args={"scheme": "FP8_DYNAMIC"})
    assert re.search("recipe_args scheme override nothing.*edit the recipe.*block_size.*sparsity", message)


@pytest.mark.parametrize("value", ["much", [0.2], None, 1.5])
def test_recipe_args_of_a_wrong_value(pristine: PreTrainedModel, output: Path, value: object):
    message = refusal(pristine, pruning(), output, recipe_args={"sparsity": value})
    assert re.search(rf"sparsity\b.*{re.escape(str(value))}", message)


def test_recipe_args_of_an_unknown_choice(pristine: PreTrainedModel, output: Path):
    message = refusal(pristine, pruning(), output, recipe_args={"layout": "flat"})
    assert re.search("layout='flat' of ChannelPruningModifier must be one of ragged, padded, uniform", message)
