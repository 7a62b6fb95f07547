"""Complete fine-tuning runs of tiny pruned checkpoints, and errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import CoverageError, Manifest, finetune, load
from moe_coverage_plugin.calibration.text import pack
from moe_coverage_plugin.manifest import REPORT_NAME, SCORES_NAME
from moe_coverage_plugin.recovery import RecoveryOptions, run
from moe_coverage_plugin.recovery.curve import CURVE_NAME, PICTURE_NAME
from moe_coverage_plugin.recovery.ranks import Ranks
from moe_coverage_plugin.recovery.training import held_out_loss
from tests.checkpoint.runs import SPARSITY, W4, aligned, config_json, logits, prune, source, tensors
from tests.recovery.cycles import FAST, LENGTH, cycles
from tests.tiny import save_model

pytestmark = pytest.mark.slow

ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def unseen() -> torch.Tensor:
    return pack(cycles(seed=2, windows=16), None, "text", LENGTH).ids_WS


def unseen_loss(model: PreTrainedModel) -> float:
    return held_out_loss(model, unseen(), 8, ONE_RANK)


@torch.no_grad()
def divergence(teacher: Path, student: Path) -> float:
    """KL divergence of the student from the teacher on unseen text in nats per token."""
    models = (AutoModelForCausalLM.from_pretrained(teacher).eval(), load(student))
    first, second = (torch.log_softmax(model(unseen()).logits, -1) for model in models)
    return float((first.exp() * (first - second)).sum(-1).mean())


@pytest.fixture(scope="module")
def recovered(pruned: Path, text: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("recovered") / "out"
    state = torch.get_rng_state()
    done = finetune(pruned, text, output, RecoveryOptions(**FAST))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state must not change"
    return output, done


def test_fine_tuning_reduces_the_loss_of_unseen_text(pruned, recovered):
    output, done = recovered
    assert done.after < done.before
    before, after = unseen_loss(load(pruned)), unseen_loss(load(output))
    # the unpruned model is random, so only the sign of the change is meaningful
    assert after < before - 0.2


def test_the_written_checkpoint_has_the_measured_loss(recovered, text):
    output, done = recovered
    held_out_WS = pack(text, None, "text", LENGTH).ids_WS[-8:]
    assert held_out_loss(aligned(load(output)), held_out_WS, 4, ONE_RANK) == pytest.approx(done.after, abs=1e-6)
    lines = [json.loads(line) for line in (output / CURVE_NAME).read_text().splitlines()]
    assert lines == done.points
    assert [line["step"] for line in lines if "held_out" in line] == [0, 4, 8]
    assert [line["step"] for line in lines if "train" in line] == list(range(1, 9))
    assert (lines[0]["held_out"], lines[-1]["held_out"]) == (done.before, done.after)
    assert (output / PICTURE_NAME).read_bytes().startswith(b"\x89PNG")


def test_learning_rate_schedule(recovered):
    rates = [point["rate"] for point in recovered[1].points if "rate" in point]
    # a warm-up of 0.1 of 8 steps is one step
    assert rates == pytest.approx([1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])


def test_only_experts_and_routers_change(pruned, recovered):
    before, after = tensors(pruned), tensors(recovered[0])
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    trained = {name for name in before if ".experts." in name or name.endswith("mlp.gate.weight")}
    assert changed == trained


def test_the_manifest_is_kept_with_a_record_of_the_run(pruned, recovered, text):
    old, new = Manifest.from_checkpoint(pruned), Manifest.from_checkpoint(recovered[0])
    assert old is not None
    assert new is not None
    assert any(old.removed_experts.values()), "the checkpoint must have removed experts"
    assert (new.widths, new.layout, new.block_size, new.intermediate_size) == (
        old.widths,
        old.layout,
        old.block_size,
        old.intermediate_size,
    )
    (run_record,) = new.provenance.pop("recovery")
    assert new.provenance == old.provenance
    assert run_record["steps"] == 8
    assert run_record["options"]["expert_lr"] == FAST["expert_lr"]
    assert run_record["versions"]["peft"]
    report = json.loads((recovered[0] / REPORT_NAME).read_text())
    assert report.pop("recovery")[0]["held_out_loss"] == [recovered[1].before, recovered[1].after]
    assert report == json.loads((pruned / REPORT_NAME).read_text())
    for name in (SCORES_NAME, "recipe.yaml", "tokenizer.json"):
        assert (recovered[0] / name).read_bytes() == (pruned / name).read_bytes()
    assert not recovered[0].with_name("out.work").exists()


def test_the_result_can_be_quantized(recovered, tmp_path):
    """A fine-tuned checkpoint is quantized and opened, as before serving."""
    loaded = load(recovered[0])
    tuned = logits(loaded)
    oneshot(model=loaded, recipe=[QuantizationModifier(**W4)], output_dir=str(tmp_path / "q4"))
    entry = Manifest.from_checkpoint(tmp_path / "q4")
    assert entry is not None
    assert entry.provenance["recovery"][0]["steps"] == 8
    assert config_json(tmp_path / "q4")["quantization_config"]["config_groups"]
    assert any(name.endswith("weight_packed") for name in tensors(tmp_path / "q4"))
    four_bits = load(tmp_path / "q4")
    assert unseen_loss(four_bits) == pytest.approx(unseen_loss(load(recovered[0])), abs=0.2)
    assert not torch.equal(logits(four_bits), tuned)


def test_four_bit_weights_are_decompressed_and_written_in_16_bit(four_bits, text, tmp_path, fast, log):
    finetune(four_bits, text, tmp_path / "out", fast)
    assert any("result is a 16-bit checkpoint, to be quantized again" in message for message in log)
    assert config_json(tmp_path / "out")["quantization_config"]["config_groups"] == {}
    before = load(four_bits)
    assert unseen_loss(load(tmp_path / "out")) < unseen_loss(before) - 0.2
    frozen = tensors(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(frozen, before.get_parameter("model.layers.0.self_attn.q_proj.weight"))


def test_a_second_run_is_recorded_after_the_first(recovered, text, tmp_path, fast):
    finetune(recovered[0], text, tmp_path / "out", fast.model_copy(update={"steps": 2}))
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert [each["steps"] for each in manifest.provenance["recovery"]] == [8, 2]


def test_router_mode_changes_routers_only(pruned, original, text, tmp_path, fast):
    options = fast.model_copy(update={"mode": "router", "batch_size": 8, "steps": 12})
    finetune(pruned, text, tmp_path / "out", options, teacher=original)
    before, after = tensors(pruned), tensors(tmp_path / "out")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("mlp.gate.weight")}
    assert divergence(original, tmp_path / "out") < divergence(original, pruned)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_distillation_reduces_the_divergence_from_the_teacher(pruned, original, text, tmp_path, fast, temperature):
    options = fast.model_copy(update={"temperature": temperature, "batch_size": 8})
    done = finetune(pruned, text, tmp_path / "out", options, teacher=original)
    assert divergence(original, tmp_path / "out") < 0.95 * divergence(original, pruned)
    assert all(point["divergence"] > 0 for point in done.points if "train" in point)


def test_checkpointing_gives_bit_identical_results(pruned, text, tmp_path, fast):
    """The balance loss is included because its terms are recorded inside the layers, which run twice."""
    for name, checkpointing in (("stored", False), ("recomputed", True)):
        options = fast.model_copy(update={"steps": 3, "balance": 0.1, "checkpointing": checkpointing})
        finetune(pruned, text, tmp_path / name, options)
    first, second = tensors(tmp_path / "stored"), tensors(tmp_path / "recomputed")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_larger_weight_reduces_the_balance_loss(pruned, text, tmp_path, fast):
    ends = []
    for balance in (1e-9, 10.0):
        done = finetune(
            pruned, text, tmp_path / str(balance), fast.model_copy(update={"balance": balance, "router_lr": 0.05})
        )
        ends.append(done.points[-2]["balance"])
    assert ends[1] < ends[0]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "ernie4_5_moe", "granitemoe", "mixtral"])
def test_families(family, text, tmp_path, fast):
    prune(source(tmp_path / "in", family), tmp_path / "pruned", sparsity=SPARSITY.get(family, 0.4))
    finetune(tmp_path / "pruned", text, tmp_path / "out", fast.model_copy(update={"steps": 4}))
    before, after = tensors(tmp_path / "pruned"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert unseen_loss(load(tmp_path / "out")) < unseen_loss(load(tmp_path / "pruned"))


# --- errors ---


def error_of(tmp_path: Path, checkpoint: Path, text: Any, options: RecoveryOptions, **more: Any) -> str:
    output = more.pop("output", tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CoverageError) as caught:
        finetune(checkpoint, text, output, options, **more)
    assert sorted(tmp_path.rglob("*")) == before, "no file may be left"
    message = str(caught.value)
    assert "\n" not in message
    assert not re.search(r"\w\. ", message), "one sentence"
    return message


def test_missing_text_is_an_error(pruned, fast, tmp_path):
    assert "absent.txt is not a file" in error_of(tmp_path, pruned, [tmp_path / "absent.txt"], fast)
    assert "0 files" in error_of(tmp_path, pruned, [], fast)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "has 0 tokens, fewer than one window of 32"),
        ("short.txt", b"w5 w6", "fewer than one window of 32: give more text"),
        ("one.txt", b"w5 " * 40, "has 1 windows"),
        ("latin.txt", b"\xff\xfe w5", "give UTF-8"),
        ("broken.jsonl", b'{"text": "w5"}\n{"text', "cannot be read as json"),
        ("chat.jsonl", b'{"messages": [{"role": "user", "content": "w5"}]}', "tokenizer.apply_chat_template"),
        ("number.jsonl", b'{"text": 5}', "has a value in 'text' that is not text"),
        ("other.jsonl", b'{"body": "w5"}', "no text in 'text'"),
        ("list.jsonl", b"[1]", "has a value in 'text' that is not text"),
    ],
)
def test_unusable_text_is_an_error(pruned, fast, tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in error_of(tmp_path, pruned, [tmp_path / name], fast)


def test_unpruned_and_padded_checkpoints_are_errors(original, text, fast, tmp_path):
    assert "is not a pruned checkpoint" in error_of(tmp_path, original, text, fast)
    assert "is not a pruned checkpoint" in error_of(tmp_path, tmp_path / "nowhere", text, fast)
    prune(original, tmp_path / "padded", "padded")
    assert "layout 'padded'" in error_of(tmp_path, tmp_path / "padded", text, fast)


def test_an_existing_output_is_an_error(pruned, text, fast, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    assert "has weights or a config that are not of this model" in error_of(tmp_path, pruned, text, fast)


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(run, "_train", lambda *_: pytest.fail("the training had begun"))


def test_work_and_output_that_cannot_be_written(pruned, text, fast, tmp_path, monkeypatch, no_training):
    """Such directories are errors before the training, also for root, which ignores permissions."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "load", lambda *_: pytest.fail("the model was opened"))
    for place in (Path("/proc/out"), tmp_path / "file" / "deep"):
        assert "cannot be created" in error_of(tmp_path, pruned, text, fast, output=place)
        assert "cannot be created" in error_of(tmp_path, pruned, text, fast, work=place)
    assert "cannot be created" in error_of(tmp_path, pruned, text, fast, work=tmp_path / "file")


@pytest.mark.parametrize("held", [{}, {"nf4": True}, {"dtype": "bfloat16"}], ids=["float32", "nf4", "bfloat16"])
def test_too_little_disk_for_the_result(pruned, text, fast, tmp_path, monkeypatch, no_training, held):
    """The result needs the space of the checkpoint, whatever format the weights have in memory."""
    stored = sum(tensor.nbytes for tensor in tensors(pruned).values()) // (2 if "dtype" in held else 1)
    options = fast.model_copy(update=held)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(0.99 * stored)))
    assert "GiB free: make room" in error_of(tmp_path, pruned, text, options)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=stored))
    with pytest.raises(pytest.fail.Exception, match="had begun"):
        finetune(pruned, text, tmp_path / "out", options)


def test_unsuitable_teachers_are_errors(pruned, original, text, fast, tmp_path):
    router = fast.model_copy(update={"mode": "router"})
    assert "give that model as teacher" in error_of(tmp_path, pruned, text, router)
    assert "is not a checkpoint" in error_of(tmp_path, pruned, text, fast, teacher=tmp_path / "nowhere")
    assert "is pruned itself" in error_of(tmp_path, pruned, text, fast, teacher=pruned)
    save_model(tmp_path / "other", vocab_size=256, num_hidden_layers=1)
    assert "vocabulary of 256" in error_of(tmp_path, pruned, text, fast, teacher=tmp_path / "other")


def test_windows_longer_than_the_context_are_an_error(pruned, fast, tmp_path):
    long = Dataset.from_dict({"input_ids": [[5] * 2000]})
    assert "256 positions" in error_of(tmp_path, pruned, long, fast.model_copy(update={"sequence_length": 512}))


def test_a_loss_that_is_not_finite_is_an_error(pruned, text, fast, tmp_path):
    broken = Path(shutil.copytree(pruned, tmp_path / "broken"))
    found = tensors(broken)
    # a value that load() accepts, and logits that overflow
    found["lm_head.weight"][:] = 1e38
    save_file(found, broken / "model.safetensors", {"format": "pt"})
    assert "loss" in error_of(tmp_path, broken, text, fast)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"expert_rank": 0}, "expert_rank=0"), ({"rank": 3}, "rank=3"), ({"warmup": 1}, "warmup=1")],
)
def test_invalid_options_are_errors(values, message):
    with pytest.raises(CoverageError, match=message):
        RecoveryOptions(**values)
