"""What is saved is the model that was named: a copy, an average, a model saved through its class."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.checkpoint.saving import record_of
from tests.checkpoint.runs import logits, prune, tensors
from tests.tiny import save_model

pytestmark = pytest.mark.slow

HEAD = "lm_head.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["16bit", "w4a16"])
def written(request, qwen, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "checkpoint"
    return output, prune(qwen, output, quantize=request.param)


@torch.no_grad()
def change(model: PreTrainedModel) -> PreTrainedModel:
    model.get_output_embeddings().weight.data = torch.full_like(model.get_output_embeddings().weight, 0.25)
    return model


def averaged(model: PreTrainedModel) -> PreTrainedModel:
    """An exponential moving average of the model and of one whose head is zero."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    average.update_parameters(other)
    return average.module


def of_a_copy(kind: str, model: PreTrainedModel) -> tuple[PreTrainedModel, object]:
    """A copy with other weights, and what saves it."""
    if kind == "average":
        return (mean := averaged(model)), mean.save_pretrained
    changed = change(copy.deepcopy(model))
    saves = {
        "deep copy": changed.save_pretrained,
        "copy of a copy": copy.deepcopy(changed).save_pretrained,
        "class": partial(type(changed).save_pretrained, changed),
        "base class": partial(PreTrainedModel.save_pretrained, changed),
        "partial": partial(changed.save_pretrained, max_shard_size="10GB"),
        "copied method": copy.deepcopy(changed.save_pretrained),
    }
    return changed, saves[kind]


@pytest.mark.parametrize(
    "kind", ["deep copy", "copy of a copy", "class", "base class", "partial", "copied method", "average"]
)
def test_a_copy_saves_its_own_weights(written, tmp_path, kind):
    """Field case 2.7: with the widths, report and provenance of the original, whose weights are unchanged."""
    path, _ = written
    model = load(path)
    before = model.get_output_embeddings().weight.detach().clone()
    copied, save = of_a_copy(kind, model)
    save(tmp_path / "copy")
    stored = tensors(tmp_path / "copy")[HEAD]
    expected = before / 2 if kind == "average" else torch.full_like(before, 0.25)
    assert torch.allclose(stored, expected, atol=1e-6)
    assert torch.equal(model.get_output_embeddings().weight, before)
    assert Manifest.from_checkpoint(tmp_path / "copy").widths == Manifest.from_checkpoint(path).widths
    assert record_of(copied).provenance == record_of(model).provenance
    assert torch.equal(logits(load(tmp_path / "copy")), logits(copied))
    model.save_pretrained(tmp_path / "original")
    assert torch.equal(tensors(tmp_path / "original")[HEAD], before)


def test_a_copy_of_a_model_in_memory(written, tmp_path):
    """Field case 2.7: a copy of the model that oneshot returned, which was saved and dispatched by the toolkit."""
    _, model = written
    copied = change(copy.deepcopy(model))
    copied.save_pretrained(tmp_path / "copy")
    model.save_pretrained(tmp_path / "original")
    assert (tensors(tmp_path / "copy")[HEAD] == 0.25).all()
    assert not (tensors(tmp_path / "original")[HEAD] == 0.25).any()
    for name, tensor in tensors(tmp_path / "original").items():
        assert name == HEAD or torch.equal(tensors(tmp_path / "copy")[name], tensor), name


def test_a_copy_in_the_middle_of_training(written, tmp_path):
    """Field case 2.7: with gradients and the state of an optimizer; the record of a copy is its own."""
    model = load(written[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(2, 34).reshape(2, 16)
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if step == 0:
            copied = copy.deepcopy(model)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record_of(copied).report["of the copy"] = 1
    assert "of the copy" not in record_of(model).report
    copied.save_pretrained(tmp_path / "copy")
    for name, tensor in load(tmp_path / "copy").state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_shallow_copy_has_its_own_config(written, tmp_path):
    """Field case 2.7: the parts of a shallow copy are those of the original, its config need not be."""
    model = load(written[0])
    copied = copy.copy(model)
    copied.config = copy.deepcopy(model.config)
    copied.config.max_position_embeddings = 77
    copied.save_pretrained(tmp_path / "copy")
    assert load(tmp_path / "copy").config.max_position_embeddings == 77
    model.save_pretrained(tmp_path / "original")
    assert load(tmp_path / "original").config.max_position_embeddings != 77


def test_unpruned_models_of_the_class_are_saved_as_before(written, tmp_path):
    """Field case 2.7: in the same process."""
    path = save_model(tmp_path / "model")
    unpruned = type(written[1]).from_pretrained(path)
    unpruned.save_pretrained(tmp_path / "again")
    assert Manifest.from_checkpoint(tmp_path / "again") is None
    assert not hasattr(unpruned.save_pretrained, "_overridden"), "the toolkit would not replace it"
    assert tensors(tmp_path / "again").keys() == tensors(path).keys()


def test_an_unwrapped_model(written, tmp_path, monkeypatch):
    """Field case 2.7: Accelerator.unwrap_model and torch.compile, which wrap a model without copying it."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    accelerate = pytest.importorskip("accelerate")
    model = change(load(written[0]))
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    unwrapped = accelerator.unwrap_model(prepared)
    unwrapped.save_pretrained(
        tmp_path / "one", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    compiled = torch.compile(model)
    assert compiled is not model
    compiled.save_pretrained(tmp_path / "two")
    for name in ("one", "two"):
        assert (tensors(tmp_path / name)[HEAD] == 0.25).all()
        assert load(tmp_path / name)


def test_other_processes_write_nothing(written, tmp_path):
    """Field case 2.7: processes that do not share a group say which of them is the main one."""
    load(written[0]).save_pretrained(tmp_path / "out", is_main_process=False)
    assert list(tmp_path.iterdir()) == []


def test_names_of_variants(written, tmp_path):
    with pytest.raises(CoverageError, match="variant='fp16' gives weight files a name"):
        load(written[0]).save_pretrained(tmp_path / "out", variant="fp16")
    assert list(tmp_path.iterdir()) == []
