"""load() and save_pretrained keep every tensor; load() stops if a tensor is missing, left over or wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.manifest import REPORT_NAME, checksum
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.checkpoint.runs import FP8, W4, aligned, config_json, logits, prompt, prune, source, tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ragged(qwen, tmp_path_factory):
    """A 16-bit checkpoint and its model."""
    path = tmp_path_factory.mktemp("ragged") / "out"
    return path, prune(qwen, path)


@pytest.fixture(scope="module")
def w4a16(qwen, tmp_path_factory):
    path = tmp_path_factory.mktemp("w4a16") / "out"
    return path, prune(qwen, path, quantize=True)


@pytest.fixture(scope="module")
def float8(qwen, tmp_path_factory):
    path = tmp_path_factory.mktemp("float8") / "out"
    return path, prune(qwen, path, quantize=FP8)


def assert_same_tensors(one, other):
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


def test_sixteen_bits_are_loaded_bit_for_bit(ragged):
    path, model = ragged
    loaded, before = load(path), model.state_dict()
    after = loaded.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(logits(aligned(loaded)), logits(model))
    assert not loaded.training
    manifest = Manifest.from_checkpoint(path)
    assert manifest is not None
    assert {layer.name: layer.widths for layer in find_moe_layers(loaded)} == manifest.widths
    assert any(0 in widths for widths in manifest.widths.values()), "a removed expert must be among them"


def test_more_than_ten_layers_keep_their_order(tmp_path):
    """Case 21: each layer gets its own widths, although JSON writers sort layer 10 before layer 2."""
    model = prune(source(tmp_path / "in", num_hidden_layers=12), tmp_path / "out")
    layers = {layer.name: layer.widths for layer in find_moe_layers(model)}
    assert len({tuple(widths) for widths in layers.values()}) > 2
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert list(manifest.widths.items()) == list(layers.items())
    assert torch.equal(logits(aligned(load(tmp_path / "out"))), logits(model))


def test_a_loaded_model_generates(ragged):
    loaded = load(ragged[0])
    generated = loaded.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_dtypes_round_trip(tmp_path, tied, dtype):
    """Case 25: tied embeddings are stored once and loaded tied; untied embeddings stay two tensors."""
    model = prune(source(tmp_path / "in", dtype=dtype, tie_word_embeddings=tied), tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.config.tie_word_embeddings == tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in tensors(tmp_path / "out")) != tied
    assert torch.equal(logits(aligned(loaded)), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert_same_tensors(tmp_path / "out", tmp_path / "again")


def test_another_dtype_on_request(ragged):
    loaded = load(ragged[0], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["ragged", "padded", "uniform"])
def test_saved_loaded_and_saved_again(qwen, tmp_path, layout):
    prune(qwen, tmp_path / "1", layout)
    load(tmp_path / "1").save_pretrained(tmp_path / "2")
    load(tmp_path / "2").save_pretrained(tmp_path / "3", max_shard_size="300KB")
    assert len(list((tmp_path / "3").glob("*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "1", tmp_path / "2")
    assert_same_tensors(tmp_path / "1", tmp_path / "3")
    assert config_json(tmp_path / "1") == config_json(tmp_path / "2") == config_json(tmp_path / "3")
    assert torch.equal(logits(aligned(load(tmp_path / "3"))), logits(aligned(load(tmp_path / "1"))))


def test_recipe_and_report_are_kept(ragged, w4a16, tmp_path):
    """Also if the last run in this process was for another checkpoint."""
    load(ragged[0]).save_pretrained(tmp_path / "out")
    for name in ("recipe.yaml", REPORT_NAME):
        assert (tmp_path / "out" / name).read_text() == (ragged[0] / name).read_text()


def test_fine_tuning(ragged, tmp_path):
    loaded = load(ragged[0])
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = loaded(input_ids=prompt(), labels=prompt()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())
    tuned = logits(loaded)
    loaded.save_pretrained(tmp_path / "tuned")
    again = load(tmp_path / "tuned")
    assert torch.equal(logits(aligned(again)), tuned)
    assert not torch.equal(tuned, logits(load(ragged[0])))


def test_quantized_later_equals_quantized_at_once(ragged, w4a16, tmp_path):
    loaded = load(ragged[0])
    oneshot(model=loaded, recipe=[QuantizationModifier(**W4)], output_dir=str(tmp_path / "out"))
    assert_same_tensors(w4a16[0], tmp_path / "out")
    later, at_once = config_json(tmp_path / "out"), config_json(w4a16[0])
    assert later["quantization_config"]["config_groups"] == at_once["quantization_config"]["config_groups"]
    assert Manifest.from_checkpoint(tmp_path / "out") is not None
    recipe = (tmp_path / "out" / "recipe.yaml").read_text()
    assert recipe.index("ChannelPruningModifier") < recipe.index("QuantizationModifier")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(w4a16[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        (["lm_head"], r"shared_expert_gate is quantized, which decides routing: .*ignore"),
        (
            ["re:.*shared_expert_gate$", r"re:.*experts\.3\.up_proj$"],
            r"in 4 bits .* engines fuse gate_proj, up_proj",
        ),
    ],
)
def test_a_later_quantizer_that_breaks_the_rules_writes_nothing(tmp_path, ignore, words):
    """Case 9, case 10, case 11: a quantizer that runs without our modifiers is checked when the model is saved."""
    prune(source(tmp_path / "in", "qwen2_moe"), tmp_path / "out")
    quantizer = QuantizationModifier(**W4 | {"ignore": ignore})
    with pytest.raises(CoverageError, match=words):
        oneshot(model=load(tmp_path / "out"), recipe=[quantizer], output_dir=str(tmp_path / "later"))
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_four_bits_are_saved_again_in_sixteen(w4a16, tmp_path):
    loaded = load(w4a16[0])
    loaded.save_pretrained(tmp_path / "out")
    quantization = config_json(tmp_path / "out")["quantization_config"]
    assert quantization["config_groups"] == {}
    assert quantization["format"] == "dense"
    assert not any("weight_packed" in name or "weight_scale" in name for name in tensors(tmp_path / "out"))
    assert torch.equal(logits(aligned(load(tmp_path / "out"))), logits(aligned(loaded)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float8_is_decompressed_to_the_dtype(float8, dtype):
    """A weight is its 8-bit value times the scale of its row, in the dtype of the model."""
    found, loaded = tensors(float8[0]), load(float8[0], dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    state = loaded.state_dict()
    quantized = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    assert any(".experts." in name for name in quantized)
    for name in quantized:
        assert torch.equal(state[name], found[name].to(dtype) * found[f"{name}_scale"].to(dtype))
    assert not any("scale" in name for name in state)


def test_float8_is_saved_again_in_full(float8, tmp_path):
    loaded = load(float8[0])
    loaded.save_pretrained(tmp_path / "out")
    assert config_json(tmp_path / "out")["quantization_config"]["config_groups"] == {}
    found = tensors(tmp_path / "out")
    assert not any(name.endswith("weight_scale") or tensor.itemsize == 1 for name, tensor in found.items())
    assert torch.equal(logits(aligned(load(tmp_path / "out"))), logits(aligned(loaded)))


def test_four_bits_of_every_layout(qwen, tmp_path):
    for layout in ("padded", "uniform"):
        model = prune(qwen, tmp_path / layout, layout, quantize=True)
        torch.testing.assert_close(logits(load(tmp_path / layout)), logits(model), rtol=1e-4, atol=1e-4)


# --- checkpoints that load() stops at ---


@pytest.fixture
def damaged(ragged, tmp_path):
    """A copy of the checkpoint and its tensors, to be damaged."""
    path = shutil.copytree(ragged[0], tmp_path / "copy")
    return path, tensors(path)


def write(path, found):
    save_file(found, path / "model.safetensors", {"format": "pt"})


def edit_entry(path, **changes):
    config = config_json(path)
    entry = config["quantization_config"]["moe_coverage"]
    entry.update(changes)
    # with a correct checksum, so that load() reaches the checks after it
    entry["sha256"] = checksum(entry)
    (path / "config.json").write_text(json.dumps(config))
    return entry


def kept_tensor(found):
    return next(name for name in sorted(found) if ".experts." in name and name.endswith("down_proj.weight"))


@pytest.mark.parametrize("which", ["expert", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_missing_tensor(damaged, which):
    """Case 21, case 23: the loader stops at a parameter without a tensor instead of leaving it random."""
    path, found = damaged
    name = kept_tensor(found) if which == "expert" else which
    del found[name]
    write(path, found)
    with pytest.raises(CoverageError, match=r"lacks 1 tensors|and so 3 weights, the checkpoint holds 2") as caught:
        load(path)
    # of an expert, the tensors that are there are named
    assert (name in str(caught.value)) is (which != "expert")


def test_an_extra_tensor(damaged):
    """Case 21, case 23: the loader stops at a tensor that the model has no parameter for."""
    path, found = damaged
    removed = Manifest.from_checkpoint(path).removed_experts
    layer, experts = next(iter(removed.items()))
    name = f"{layer}.{experts[0]}.up_proj.weight"
    write(path, found | {name: torch.ones(1, 128)})
    with pytest.raises(CoverageError) as caught:
        load(path)
    assert name in str(caught.value)


def test_a_wrong_shape(damaged):
    path, found = damaged
    name = kept_tensor(found)
    write(path, found | {name: found[name][:, :-1].contiguous()})
    with pytest.raises(CoverageError, match="has shape") as caught:
        load(path)
    assert name in str(caught.value)


def test_a_manifest_of_another_length(damaged):
    path, _ = damaged
    widths = config_json(path)["quantization_config"]["moe_coverage"]["widths"]
    first = next(iter(widths))
    edit_entry(path, widths=widths | {first: widths[first][:-1]}, tokens={})
    with pytest.raises(CoverageError, match=r"but model.layers.0.mlp.experts has 7 experts in the manifest"):
        load(path)


def test_a_manifest_without_a_layer(damaged):
    path, _ = damaged
    widths = config_json(path)["quantization_config"]["moe_coverage"]["widths"]
    edit_entry(path, widths=dict(list(widths.items())[:1]), tokens={})
    with pytest.raises(CoverageError, match=r"of model.layers.1.mlp.experts, which the manifest does not name"):
        load(path)


def test_a_manifest_that_fits_no_tensor(damaged):
    path, _ = damaged
    widths = config_json(path)["quantization_config"]["moe_coverage"]["widths"]
    edit_entry(path, widths={name: list(reversed(each)) for name, each in widths.items()})
    with pytest.raises(CoverageError):
        load(path)


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_an_unknown_schema_version(damaged, version):
    path, _ = damaged
    edit_entry(path, version=version)
    with pytest.raises(CoverageError, match="schema version"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"widths": {}},
        {"widths": {"model.layers.0.mlp.experts": [-1] * 8}},
        {"widths": {"model.layers.0.mlp.experts": [33] * 8}},
        {"widths": {"model.layers.0.mlp.experts": ["32"] * 8}},
        {"widths": [1, 2]},
        {"widths": None},
        {"widths": {"model.layers.0.mlp.experts": 32}},
        {"layout": "squashed"},
        {"block_size": 0},
        {"block_size": "x"},
        {"intermediate_size": None},
    ],
    ids=str,
)
def test_a_damaged_entry(damaged, changes):
    path, _ = damaged
    edit_entry(path, **changes)
    with pytest.raises(CoverageError):
        load(path)


def test_an_entry_that_is_not_a_mapping(damaged):
    path, _ = damaged
    config = config_json(path)
    config["quantization_config"]["moe_coverage"] = [1]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoverageError):
        load(path)


def test_no_entry_and_no_checkpoint(qwen, tmp_path):
    for path in (qwen, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CoverageError, match="is not a pruned checkpoint"):
            load(path)


def test_a_broken_config(damaged):
    path, _ = damaged
    (path / "config.json").write_text('{"model_type": "qwen3_moe", ')
    with pytest.raises(CoverageError, match=r"config\.json"):
        load(path)


@pytest.mark.parametrize("keep", [0, 5, 1000, 0.5, 0.999])
def test_a_truncated_file(damaged, keep):
    path, _ = damaged
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CoverageError, match=r"model\.safetensors"):
        load(path)


def test_a_missing_file(damaged):
    path, _ = damaged
    (path / "model.safetensors").unlink()
    with pytest.raises(CoverageError, match=r"model\.safetensors"):
        load(path)


def test_a_missing_shard(ragged, tmp_path):
    load(ragged[0]).save_pretrained(tmp_path / "out", max_shard_size="300KB")
    victim = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CoverageError) as caught:
        load(tmp_path / "out")
    assert victim.name in str(caught.value)


def test_a_tensor_in_two_shards(ragged, tmp_path):
    load(ragged[0]).save_pretrained(tmp_path / "out", max_shard_size="300KB")
    first, second = sorted((tmp_path / "out").glob("model-*.safetensors"))[:2]
    from safetensors.torch import load_file

    one, other = load_file(first), load_file(second)
    name = next(iter(one))
    save_file(other | {name: torch.zeros_like(one[name])}, second, {"format": "pt"})
    with pytest.raises(CoverageError) as caught:
        load(tmp_path / "out")
    assert name in str(caught.value)


def test_a_damaged_four_bit_tensor(w4a16, tmp_path):
    path = shutil.copytree(w4a16[0], tmp_path / "copy")
    found = tensors(path)
    scale = next(name for name in sorted(found) if ".experts." in name and name.endswith("weight_scale"))
    del found[scale]
    write(path, found)
    with pytest.raises(CoverageError) as caught:
        load(path)
    assert scale in str(caught.value)


def test_a_wrong_recorded_shape_of_a_four_bit_tensor(w4a16, tmp_path):
    path = shutil.copytree(w4a16[0], tmp_path / "copy")
    found = tensors(path)
    name = next(name for name in sorted(found) if ".experts." in name and name.endswith("weight_shape"))
    found[name] = found[name] + 32
    write(path, found)
    with pytest.raises(CoverageError) as caught:
        load(path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "message"), [(torch.float32, "does not belong to"), (torch.float8_e5m2, "is stored in another way")]
)
def test_plain_numbers_instead_of_scaled_ones(float8, tmp_path, dtype, message):
    """They would be multiplied by scales of other numbers."""
    path = shutil.copytree(float8[0], tmp_path / "copy")
    found = tensors(path)
    name = kept_tensor(found)
    write(path, found | {name: found[name].to(torch.float32).to(dtype)})
    with pytest.raises(CoverageError, match=message) as caught:
        load(path)
    assert name in str(caught.value)


def test_scaled_numbers_instead_of_plain_ones(damaged):
    path, found = damaged
    name = kept_tensor(found)
    write(path, found | {name: found[name].to(torch.float8_e4m3fn)})
    with pytest.raises(CoverageError, match=r"lacks .*weight_scale, without which the weight cannot be read"):
        load(path)


def test_a_tensor_of_another_kind(damaged):
    path, found = damaged
    name = kept_tensor(found)
    write(path, found | {name: found[name].to(torch.int32)})
    with pytest.raises(CoverageError) as caught:
        load(path)
    assert name in str(caught.value)
