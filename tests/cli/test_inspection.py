"""``moe-coverage inspect`` prints what is in a checkpoint, and stops at damaged ones with an error in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moe_coverage_plugin import Manifest
from moe_coverage_plugin.expert_placement import layer_loads, place_experts
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import INDEX_NAME, REPORT_NAME, SCORES_NAME
from moe_coverage_plugin.parallelism import imbalance
from tests.modifiers import harness

WEIGHTS = "model.safetensors"


def inspected(script: Any, tmp_path: Path, directory: Path) -> dict[str, Any]:
    done = script("inspect", directory, "--json", tmp_path / "inspect.json")
    assert done.status == 0, done.err
    return json.loads((tmp_path / "inspect.json").read_text())


@pytest.mark.parametrize("name", ["pruned", "uniform", "shared", "float8"])
def test_the_summary_matches_the_files(script: Any, tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(name)
    summary = inspected(script, tmp_path, directory)
    manifest = Manifest.from_checkpoint(directory)
    assert manifest is not None
    assert {layer["name"]: layer["widths"] for layer in summary["layers"]} == manifest.widths
    assert {
        layer["name"]: layer["removed"] for layer in summary["layers"] if layer["removed"]
    } == manifest.removed_experts
    assert (summary["layout"], summary["provenance"]) == (manifest.layout, manifest.provenance)
    reported = json.loads((directory / REPORT_NAME).read_text())["layers"]
    for layer in summary["layers"]:
        assert layer["coverage"] == reported[layer["name"]]["coverage"]
        assert layer["tokens"] == reported[layer["name"]]["tokens"]
    tensors = load_file(directory / WEIGHTS)
    experts = sum(tensor.nbytes for key, tensor in tensors.items() if ".mlp.experts." in key)
    everything = sum(tensor.nbytes for tensor in tensors.values())
    # 2 layers of 8 experts with 3 matrices of 256 x 128 in 2 bytes
    assert summary["bytes"] == {
        "experts": experts,
        "other": everything - experts,
        "experts_unpruned_16_bit": 2 * 8 * 3 * 256 * 128 * 2,
    }
    assert summary["remarks"] == []
    assert manifest.tokens == {layer["name"]: layer["tokens"] for layer in summary["layers"]}


@pytest.mark.parametrize("name", ["pruned", "shared", "float8"])
def test_balance_of_expert_parallel_ranks(
    script: Any, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Bytes in the files and calibration tokens, under the placement that engines compute from the entry."""
    directory: Path = request.getfixturevalue(name)
    balance = inspected(script, tmp_path, directory)["expert_parallel"]["balance"]
    assert list(balance) == ["2", "4", "8"]
    manifest = Manifest.from_checkpoint(directory)
    assert manifest is not None
    bits = {"pruned": 16, "shared": 4, "float8": 8}[name]
    loads = layer_loads(manifest, dict.fromkeys(manifest.widths, bits))
    holders = dict(zip(loads, place_experts(list(loads.values()), 2), strict=True))
    stored, work = [0, 0], [[0, 0] for _ in loads]
    for key, tensor in load_file(directory / WEIGHTS).items():
        if ".mlp.experts." in key and not key.endswith("_shape"):
            layer, _, rest = key.partition(".experts.")
            stored[holders[f"{layer}.experts"][int(rest.partition(".")[0])]] += tensor.nbytes
    for number, (layer, holders_E) in enumerate(holders.items()):
        for rank, width, tokens in zip(holders_E, manifest.widths[layer], manifest.tokens[layer], strict=True):
            work[number][rank] += width * tokens
    assert balance["2"]["bytes"] == pytest.approx(max(stored) * 2 / sum(stored))
    assert balance["2"]["work"] == pytest.approx(sum(map(max, work)) * 2 / sum(map(sum, work)))
    for ratios in balance.values():
        assert 1 <= ratios["bytes"] <= ratios["bytes_by_number"] * 1.001
        assert 1 <= ratios["work"] <= ratios["work_by_number"]
    assert f"{balance['2']['bytes']:.3f}" in script("inspect", directory).out.split("expert-parallel ranks")[1]


def test_prints_the_main_figures(script: Any, pruned: Path, source: Path) -> None:
    done = script("inspect", pruned)
    lines = {line.split("  ")[0].strip(): line for line in done.out.splitlines()}
    assert "ragged, widths in blocks of 64, 256 channels before pruning" in lines["layout"]
    assert "not quantized (float32)" in lines["weights"]
    assert "3,072 of 4,096 kept (75.0 %)" in lines["channels"]
    assert str(source) in lines["model"]
    assert lines["tensor parallel in vLLM: 1, 2, 4"]
    # every width with its number of experts
    manifest = Manifest.from_checkpoint(pruned)
    assert manifest is not None
    widths = [width for layer in manifest.widths.values() for width in layer]
    for width in manifest.distinct_widths:
        assert f"{width}  {widths.count(width):>7}".split() == lines[str(width)].split()[:2]


def test_degrees_of_quantized_experts_of_one_width(script: Any, tmp_path: Path, uniform: Path) -> None:
    summary = inspected(script, tmp_path, uniform)
    assert summary["quantization"][0]["group_size"] == 64
    # o_proj has 4 heads of 64 as input, experts 128 channels, both in groups of 64
    assert summary["tensor_parallel"]["legal"] == [1, 2]
    assert summary["tensor_parallel"]["blocked"]["4"] == [
        "32 channels of the experts on each rank are not a multiple of the group size 64"
    ]
    assert summary["expert_parallel"] == {"legal": [1, 2, 4], "balance": {}}
    # builds for CPUs have no kernel for such experts, and ours assigns groups unevenly
    assert summary["tensor_parallel"]["legal_on_cpus_only"] == [4]
    assert "\n  in builds of vLLM for CPUs also 4\n" in script("inspect", uniform).out


@pytest.mark.parametrize("name", ["pruned", "shared", "float8"])
def test_degrees_of_other_checkpoints_are_those_of_all_builds(
    script: Any, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Field case 2.17: ragged experts are served by our method in all builds, those in 16 bit by vLLM's own."""
    directory = request.getfixturevalue(name)
    assert inspected(script, tmp_path, directory)["tensor_parallel"]["legal_on_cpus_only"] == []
    assert "for CPUs" not in script("inspect", directory).out


def test_the_config_is_read_once(script: Any, pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda file, **kwargs: reads.append(file.name) or read_text(file, **kwargs))
    assert script("inspect", pruned).status == 0
    assert reads.count("config.json") == 1


def test_degrees_of_ragged_experts_follow_the_other_layers(script: Any, tmp_path: Path, shared: Path) -> None:
    """Case 5: the layer that blocks a degree of tensor parallelism is named."""
    summary = inspected(script, tmp_path, shared)
    assert summary["layout"] == "ragged"
    # ragged experts are split in units of groups; the 6 groups of the shared expert and the 2 of o_proj are not
    assert summary["tensor_parallel"]["legal"] == [1, 2]
    assert summary["tensor_parallel"]["blocked"]["4"] == [
        "32 channels of the attention output on each rank are not a multiple of the group size 64",
        "96 channels of the shared expert on each rank are not a multiple of the group size 64",
    ]


def test_float8_has_no_groups_that_ranks_must_keep(script: Any, tmp_path: Path, float8: Path) -> None:
    """A scale belongs to a row, so experts are split in units of channels, and other layers anywhere."""
    summary = inspected(script, tmp_path, float8)
    (stored,) = summary["quantization"]
    assert (stored["type"], stored["num_bits"], stored["group_size"]) == ("float", 8, None)
    assert (stored["input_activations"]["strategy"], stored["input_activations"]["dynamic"]) == ("token", True)
    # experts have one byte per weight and four per row for its scale
    widths = [width for layer in summary["layers"] for width in layer["widths"]]
    assert summary["bytes"]["experts"] == sum(3 * 128 * width + 4 * (2 * width + 128) for width in widths)
    parallel = summary["tensor_parallel"]
    assert parallel["legal"] == [1, 2, 4]
    by_layer = [layer["widths"] for layer in summary["layers"]]
    assert parallel["imbalance"] == {str(degree): imbalance(by_layer, 1, degree) for degree in (1, 2, 4)}
    assert parallel["imbalance"]["4"] != imbalance(by_layer, 8, 4)
    lines = {line.split("  ")[0].strip(): line for line in script("inspect", float8).out.splitlines()}
    activations = "(activations float8, symmetric, one scale per token)"
    assert lines["weights"].endswith(f"float8, symmetric, one scale per channel {activations}")


def test_many_widths_are_counted_by_range(script: Any, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "exact"
    harness.compress(source, harness.pruning(block_size=None), output_dir=str(target))
    widths = [w for layer in inspected(script, tmp_path, target)["layers"] for w in layer["widths"]]
    assert len(set(widths)) > 8
    table = script("inspect", target).out.partition("width  experts")[2].partition("tensor parallel")[0]
    rows = [line.split() for line in table.splitlines() if line.strip()]
    for label, count, _ in rows:
        first, _, last = label.partition("-")
        assert int(count) == sum(int(first) <= width <= int(last or first) for width in widths)
    assert sum(int(count) for _, count, _ in rows) == len(widths)


def test_draws_with_and_without_scores(script: Any, copy: Path, tmp_path: Path) -> None:
    assert (copy / SCORES_NAME).is_file()
    for with_scores in (True, False):
        folder = tmp_path / f"pictures_{with_scores}"
        assert script("inspect", copy, "--pictures", folder).status == 0
        assert {"index.html", "widths.png"} <= {file.name for file in folder.iterdir()}
        (copy / SCORES_NAME).unlink(missing_ok=True)
        (copy / REPORT_NAME).unlink(missing_ok=True)


def test_scores_of_another_model_are_not_drawn(refusal: Any, copy: Path, tmp_path: Path) -> None:
    scores, provenance = load_scores(copy / SCORES_NAME)
    scores.names.reverse()
    scores.names[0] = "model.layers.9.mlp.experts"
    save_scores(copy / SCORES_NAME, scores, provenance)
    assert "has scores of other experts" in refusal("inspect", copy, "--pictures", tmp_path / "pictures")
    (copy / SCORES_NAME).write_bytes(b"damaged")
    assert "cannot be read" in refusal("inspect", copy, "--pictures", tmp_path / "pictures")


def test_a_missing_report_is_noted(script: Any, copy: Path, tmp_path: Path) -> None:
    (copy / REPORT_NAME).unlink()
    summary = inspected(script, tmp_path, copy)
    assert all(layer["coverage"] is None and layer["tokens"] is None for layer in summary["layers"])
    done = script("inspect", copy)
    assert f"note: no {REPORT_NAME}, so coverage and calibration tokens are unknown" in done.out


@pytest.mark.parametrize("text", ["", "[]", "{", '{"layers": 3}', '{"layers": {"a": {}}}', '{"layers": {"a": 1}}'])
def test_a_report_that_does_not_fit_is_ignored(script: Any, copy: Path, text: str) -> None:
    (copy / REPORT_NAME).write_text(text)
    done = script("inspect", copy)
    assert done.status == 0
    assert done.out.count("note: ") == 1


def test_a_report_of_other_widths_is_ignored(script: Any, copy: Path) -> None:
    report = json.loads((copy / REPORT_NAME).read_text())
    next(iter(report["layers"].values()))["widths"][0] += 64
    (copy / REPORT_NAME).write_text(json.dumps(report))
    assert f"{REPORT_NAME} is damaged or of another checkpoint" in script("inspect", copy).out


def test_directories_without_our_entry(refusal: Any, source: Path, tmp_path: Path) -> None:
    assert "is not a pruned checkpoint, moe_coverage is not in its config.json" in refusal("inspect", source)
    assert "is not a directory" in refusal("inspect", source / "config.json")
    assert "is not a directory" in refusal("inspect", tmp_path / "absent")
    assert "config.json cannot be read" in refusal("inspect", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "[]", "is not a JSON object"),
        (lambda _: "{", "cannot be read"),
        (lambda config: json.dumps(config | {"quantization_config": "W4A16"}), "is 'W4A16', expected an object"),
        (lambda config: json.dumps(config | {"text_config": 3}), "is damaged"),
        (lambda config: edited(config, config_groups=3), "is 3, expected an object"),
        (lambda config: edited(config, moe_coverage=3), "is not a mapping"),
        (lambda config: edited(config, moe_coverage=entry(config) | {"version": 2}), "schema version 2"),
        (lambda config: edited(config, moe_coverage=entry(config) | {"widths": {"a": []}}), "a layer without experts"),
        (lambda config: json.dumps({**config, "hidden_size": None}), "hidden_size None"),
        (lambda config: json.dumps({**config, "num_attention_heads": "4"}), "num_attention_heads '4'"),
        (lambda config: json.dumps({**config, "vocab_size": 0}), "vocab_size 0"),
    ],
)
def test_a_damaged_config(refusal: Any, copy: Path, change: Any, words: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(change(config))
    assert words in refusal("inspect", copy)


def entry(config: dict[str, Any]) -> dict[str, Any]:
    return config["quantization_config"]["moe_coverage"]


def edited(config: dict[str, Any], **changes: Any) -> str:
    return json.dumps(config | {"quantization_config": config["quantization_config"] | changes})


def test_damaged_weights(refusal: Any, copy: Path) -> None:
    whole = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(whole[:-1])
    assert f"{WEIGHTS} cannot be read" in refusal("inspect", copy)
    (copy / WEIGHTS).unlink()
    assert "holds no weights" in refusal("inspect", copy)
    (copy / WEIGHTS).write_bytes(whole)
    (copy / INDEX_NAME).write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "lacks model-2.safetensors" in refusal("inspect", copy)


def test_weights_of_other_widths(refusal: Any, copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    name = next(name for name in tensors if ".experts." in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, copy / WEIGHTS)
    assert "weights, the checkpoint holds" in refusal("inspect", copy)


@pytest.mark.parametrize("tensor", ["weight_scale", "weight_shape"])
def test_packed_weights_without_their_scales(refusal: Any, uniform: Path, tmp_path: Path, tensor: str) -> None:
    copy = Path(shutil.copytree(uniform, tmp_path / "copy"))
    tensors = load_file(copy / WEIGHTS)
    kept = {key: value for key, value in tensors.items() if not key.endswith(f"o_proj.{tensor}")}
    save_file(kept, copy / WEIGHTS)
    assert re.search(rf"lacks .*o_proj\.{tensor}, without which", refusal("inspect", copy))


def damaged(value: Any, draw: Any) -> Any:
    """The value with one part replaced or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 9)) == 0:
            return {other: inner for other, inner in value.items() if other != key}
        return value | {key: damaged(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], damaged(value[place], draw), *value[place + 1 :]]
    odd = [None, True, -1, 0, 3, 64, 10**30, 0.5, float("nan"), "", "no", [], [[]], {}, {"": 1}, "[" * 9]
    return draw(st.sampled_from(odd))


@given(st.data(), st.sampled_from(["config.json", REPORT_NAME]))
def test_no_damage_ends_in_a_traceback(script: Any, pruned: Path, copy: Path, data: st.DataObject, name: str) -> None:
    original = json.loads((pruned / name).read_text())
    (copy / name).write_text(json.dumps(damaged(original, data.draw)))
    done = script("inspect", copy)
    assert (done.status, bool(done.out), done.err.count("\n")) in [(0, True, 0), (2, False, 1)]
    shutil.copyfile(pruned / name, copy / name)


@given(st.data())
def test_no_damaged_bytes_end_in_a_traceback(script: Any, pruned: Path, copy: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["config.json", REPORT_NAME, WEIGHTS]))
    original = (pruned / name).read_bytes()
    # the header of the weights, and what is before it
    place = data.draw(st.integers(0, min(len(original), 4000)))
    (copy / name).write_bytes(original[:place] + data.draw(st.binary(max_size=4)) + original[place + 1 :])
    assert script("inspect", copy).status in (0, 2)
    shutil.copyfile(pruned / name, copy / name)


def test_names_of_files(copy: Path) -> None:
    assert (REPORT_NAME, SCORES_NAME) == ("moe_coverage_report.json", "moe_coverage/scores.safetensors")
    assert {REPORT_NAME, SCORES_NAME} <= {str(file.relative_to(copy)) for file in copy.rglob("*")}


def test_loads_no_weight(script: Any, copy: Path) -> None:
    """The result is the same if the weights are replaced by a sparse file of the same length."""
    before = script("inspect", copy).out
    data = (copy / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    (copy / WEIGHTS).write_bytes(data[:header])
    os.truncate(copy / WEIGHTS, len(data))
    assert script("inspect", copy).out == before
