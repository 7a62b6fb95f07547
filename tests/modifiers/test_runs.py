"""What one run does to a model, logs and writes, and that the next run is independent of it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from llmcompressor.args import DatasetArguments
from llmcompressor.core import active_session, reset_session
from llmcompressor.pipelines import CalibrationPipeline
from torch.utils.data import DataLoader

from moe_coverage_plugin import AlignmentModifier, AttributionModifier, CoverageModifier, Manifest, load
from moe_coverage_plugin.core.scores import TOKEN_FLOOR
from moe_coverage_plugin.modifiers.output_checks import model_bytes
from tests import paper_method
from tests.modifiers.harness import (
    BLOCK,
    CHANNELS,
    EXPERTS,
    LAYERS,
    compress,
    flat_widths,
    logits,
    open_linear,
    pruning,
    save_tiny,
    widths,
)
from tests.tiny import token_batches

pytestmark = pytest.mark.slow

REPORT = "moe_coverage_report.json"
EXPERTS_NAME = "model.layers.{}.mlp.experts"


def report_of(output: Path) -> dict:
    return json.loads((output / REPORT).read_text())


# --- layers left unpruned


@pytest.mark.parametrize("pattern", ["model.layers.0", "model.layers.0.mlp.experts", r"re:.*layers\.0\..*"])
def test_ignored_layer_stays_unpruned(source: Path, tmp_path: Path, pattern: str):
    """Case 28: the manifest has the full width of a layer that was left unpruned."""
    model = compress(source, pruning(0.5, None, ignore=[pattern]), output_dir=str(tmp_path / "out"))
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest.widths[EXPERTS_NAME.format(0)] == [CHANNELS] * EXPERTS
    assert sum(manifest.widths[EXPERTS_NAME.format(1)]) == EXPERTS * CHANNELS // 2
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_layers_pruned_in_turn(source: Path, tmp_path: Path):
    first = compress(source, pruning(0.5, None, ignore=["model.layers.0"]))
    model = compress(first, pruning(0.25, ignore=["model.layers.1"]), output_dir=str(tmp_path / "out"))
    assert sum(widths(model)[1]) == EXPERTS * CHANNELS // 2
    assert 0 < sum(widths(model)[0]) <= EXPERTS * CHANNELS * 3 // 4
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


# --- layouts


@pytest.mark.parametrize("layout", ["padded", "uniform"])
def test_layouts_that_cannot_remove_experts(source: Path, tmp_path: Path, layout: str, log: list[str]):
    output = tmp_path / "out"
    ragged = compress(source, pruning(0.5))
    removed = sum(layer.count(0) for layer in widths(ragged))
    assert removed > 0, "this test needs a plan that removes experts"
    model = compress(source, pruning(0.5, layout=layout), output_dir=str(output))
    manifest = Manifest.from_checkpoint(output)
    assert len(manifest.distinct_widths) == 1
    assert not manifest.removed_experts
    assert report_of(output)["experts_kept_for_layout"] == removed
    kept = BLOCK if layout == "padded" else manifest.distinct_widths[0]
    assert f"WARNING layout='{layout}' cannot remove experts: {removed} keep {kept} channels instead of none" in log
    if layout == "uniform":
        assert manifest.distinct_widths == [CHANNELS // 2]
    else:
        assert manifest.distinct_widths == [max(map(max, widths(ragged)))]
    assert torch.equal(logits(load(output)), logits(model))


def test_uniform_layout_spends_what_alignment_could_not(source: Path):
    alignment = AlignmentModifier(block_size=BLOCK, min_width=CHANNELS // 2, **paper_method.ALIGNMENT)
    attribution, coverage, _, channel_pruning = pruning(0.5, layout="uniform")
    model = compress(source, [attribution, coverage, alignment, channel_pruning])
    assert sum(alignment.plan.widths_LE.flatten().tolist()) < LAYERS * EXPERTS * CHANNELS // 2
    assert set(flat_widths(model)) == {CHANNELS // 2}


def test_padding_changes_no_output(source: Path):
    ragged = compress(source, pruning(0.1, None, expert_prior="uniform"))
    padded = compress(source, pruning(0.1, None, "padded", expert_prior="uniform"))
    assert 0 not in flat_widths(ragged), "with removed experts the layouts differ"
    assert widths(ragged) != widths(padded)
    assert torch.allclose(logits(ragged), logits(padded), rtol=1e-5, atol=1e-5)


def test_ragged_reports_no_expert_kept_for_the_layout(source: Path, tmp_path: Path):
    compress(source, pruning(0.5), output_dir=str(tmp_path / "out"))
    assert report_of(tmp_path / "out")["experts_kept_for_layout"] == 0


# --- the log


def test_log_says_what_was_pruned(source: Path, log: list[str]):
    model = compress(source, pruning(0.5))
    flat = flat_widths(model)
    total = LAYERS * EXPERTS * CHANNELS
    line = next(line for line in log if "Removed" in line)
    assert f"Removed {total - sum(flat)} of {total} expert channels and {flat.count(0)} experts" in line
    assert f"Coverage keeps {total // 2} of {total} expert channels" in "\n".join(log)


def test_log_says_bytes_before_and_after(source: Path, tmp_path: Path, log: list[str]):
    """Case 22: a step that did nothing is visible in the bytes before and after."""
    before = model_bytes(open_linear(source))
    model = compress(source, pruning(0.5), output_dir=str(tmp_path / "out"))
    after = model_bytes(model)
    assert after < before
    sizes = f"{before / 2**20:.1f} MiB of weights became {after / 2**20:.1f}"
    assert any(sizes in line for line in log)
    stored = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert f"INFO Saved {tmp_path / 'out'}: {stored / 2**20:.1f} MiB of weights" in log


def test_experts_without_a_token_are_named(source: Path, tmp_path: Path, log: list[str]):
    """Case 17: experts that no token reached are named in a warning, and the report has the tokens of every expert."""
    two_tokens = token_batches(samples=1, length=2)
    compress(source, pruning(0.1, None), dataset=two_tokens, output_dir=str(tmp_path / "out"))
    unreached = report_of(tmp_path / "out")["experts_without_tokens"]
    assert unreached, "two tokens reach at most four of eight experts"
    for name, experts in unreached.items():
        assert len(experts) >= EXPERTS - 4
        assert f"WARNING No calibration token reached experts {experts} of {name}: their scores are zero" in log
        tokens = report_of(tmp_path / "out")["layers"][name]["tokens"]
        assert [expert for expert, count in enumerate(tokens) if count == 0] == experts


def test_experts_with_few_tokens_are_named(source: Path, log: list[str]):
    """Case 17: a warning names experts whose scores are uncertain because they had few tokens."""
    attribution, *others = pruning(0.1, None)
    compress(source, [attribution, *others], dataset=token_batches(samples=4, length=TOKEN_FLOOR))
    tokens_LE = attribution.measured.tokens_LE
    assert tokens_LE.min() < TOKEN_FLOOR <= tokens_LE.max()
    for name, tokens_E in zip(attribution.measured.names, tokens_LE.tolist(), strict=True):
        few = [expert for expert, count in enumerate(tokens_E) if 0 < count < TOKEN_FLOOR]
        warning = (
            f"WARNING Fewer than {TOKEN_FLOOR} calibration tokens reached experts {few} of {name}: their scores are"
        )
        assert any(line.startswith(warning) for line in log) == bool(few)


# --- measurements


def test_shuffled_and_padded_batches_leave_padding_out(source: Path):
    """The toolkit draws the samples again for every pass, so the mask is that of the current batch."""
    dataset = token_batches(samples=8, length=32, padded=True)

    def tokens(**options) -> int:
        attribution = AttributionModifier(channel_metric="activation")
        recipe = [attribution, CoverageModifier(sparsity=0.25, **paper_method.EVEN_LAYERS)]
        torch.manual_seed(0)
        compress(source, recipe, dataset=dataset, **options)
        return int(attribution.measured.tokens_LE.sum()) // LAYERS // 2

    real = sum(map(sum, dataset["attention_mask"]))
    assert real < 8 * 32
    assert tokens() == real
    assert tokens(shuffle_calibration_samples=True) == real
    assert tokens(shuffle_calibration_samples=True, batch_size=2) == real
    subset = tokens(shuffle_calibration_samples=True, num_calibration_samples=3)
    assert subset in {sum(map(sum, rows)) for rows in combinations(dataset["attention_mask"], 3)}


def test_provenance_hashes_the_samples_that_were_seen(source: Path, tmp_path: Path):
    """Case 29: the checkpoint shows whether a result was made from the same samples."""
    hashes = []
    for name, options in {"first": {}, "again": {}, "other": {"num_calibration_samples": 3}}.items():
        torch.manual_seed(0)
        options = {"shuffle_calibration_samples": True, "num_calibration_samples": 2} | options
        compress(source, pruning(), dataset=token_batches(8, 24), output_dir=str(tmp_path / name), **options)
        provenance = Manifest.from_checkpoint(tmp_path / name).provenance
        assert provenance["calibration_batches"] == options["num_calibration_samples"]
        hashes.append(provenance["calibration_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


# --- one process, many runs


def test_new_modifiers_are_independent_of_earlier_runs(source: Path, tmp_path: Path):
    first = compress(source, pruning(0.4))
    other = save_tiny(tmp_path / "other", num_hidden_layers=1, num_experts=4)
    compress(other, pruning(0.6))
    again = compress(source, pruning(0.4))
    assert widths(first) == widths(again)
    assert torch.equal(logits(first), logits(again))


def test_a_run_that_stopped_does_not_change_the_next(source: Path):
    model = open_linear(source)
    with pytest.raises(ValueError, match="sparsity"):
        compress(model, pruning(0.9999))
    assert torch.equal(logits(compress(model, pruning(0.4))), logits(compress(source, pruning(0.4))))


def test_the_toolkit_does_not_accept_used_modifiers(source: Path):
    recipe = pruning()
    compress(source, recipe)
    with pytest.raises(RuntimeError, match="already been initialized"):
        compress(source, recipe)


def test_no_hook_of_ours_stays_on_the_model(source: Path):
    model = compress(source, pruning(0.1, None, expert_prior="uniform"))
    assert 0 not in flat_widths(model)
    hooks = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks


def test_subclass_of_ours_counts_as_ours(source: Path):
    class MyCoverage(CoverageModifier):
        pass

    attribution, _, alignment, channel_pruning = pruning()
    coverage = MyCoverage(sparsity=0.1, **paper_method.EVEN_LAYERS)
    recipe = [attribution, coverage, alignment, channel_pruning]
    model = compress(source, recipe, pipeline="sequential", recipe_args={"sparsity": 0.25})
    assert widths(model) == widths(compress(source, pruning(0.25)))


def test_session_driven_by_hand(source: Path, tmp_path: Path):
    model = open_linear(source)
    model.config._name_or_path = str(source)
    data = token_batches(4, 24).with_format("torch")
    loader = DataLoader(data, batch_size=1)
    reset_session()
    active_session().initialize(model=model, recipe=pruning(0.4), calib_data=loader, start=-1)
    CalibrationPipeline.load_from_registry("independent")(model, loader, DatasetArguments())
    active_session().finalize()
    model.save_pretrained(tmp_path / "out")
    assert widths(model) == widths(compress(source, pruning(0.4)))
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))
