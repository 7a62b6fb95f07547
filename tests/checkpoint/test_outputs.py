"""What may be in an output directory: files of the user stay, and there is a complete checkpoint or none."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.checkpoint import merging, staging
from moe_coverage_plugin.checkpoint.staging import check_output
from tests.checkpoint.runs import config_json, logits, prune, tensors
from tests.tiny import save_model, token_batches

pytestmark = pytest.mark.slow

HEAD = "lm_head.weight"
# what users, trainers, git and the hub's client leave in directories, and no engine opens as weights
FOREIGN = {
    "notes.txt": "mine",
    ".gitattributes": "*.safetensors filter=lfs",
    ".git/objects/ab/cd": "blob",
    ".cache/huggingface/download/model.lock": "",
    "logs/events.out.tfevents.1": "event",
    "checkpoint-1/model.safetensors": "not read",
    "checkpoint-1/config.json": "{}",
    "checkpoint-1/optimizer.pt": "state",
    "original/consolidated.00.pth": "not read",
    "training_args.bin": "arguments",
    "trainer_state.json": "{}",
    "optimizer.pt": "state",
    "moe_coverage/notes.txt": "in a folder of ours",
}


@pytest.fixture(scope="module")
def written(qwen, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "checkpoint"
    prune(qwen, output)
    return output


@pytest.fixture
def model(written) -> PreTrainedModel:
    return load(written)


def fill(directory: Path) -> Path:
    for name, content in FOREIGN.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    (directory / "latest").symlink_to("checkpoint-1")
    (directory / "notes.txt").chmod(0o400)
    return directory


def assert_filled(directory: Path) -> None:
    assert {name: (directory / name).read_text() for name in FOREIGN} == FOREIGN
    assert os.readlink(directory / "latest") == "checkpoint-1"
    assert stat.S_IMODE((directory / "notes.txt").stat().st_mode) == 0o400
    assert not list(directory.parent.glob(".*")), "no partial directory stays"


@torch.no_grad()
def change(model: PreTrainedModel) -> PreTrainedModel:
    model.get_output_embeddings().weight.data = torch.full_like(model.get_output_embeddings().weight, 0.25)
    return model


def snapshot(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in directory.rglob("*")}


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that cannot exchange directories."""
    monkeypatch.setattr(merging, "_exchange", lambda *_: False)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_args, **_options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


SYSTEMS = {"linux": lambda _: None, "no exchange": without_exchange, "no links": without_links}


@pytest.mark.parametrize("system", SYSTEMS)
def test_foreign_files_are_kept(model, tmp_path, monkeypatch, system):
    """Field case 2.5: files that make no checkpoint, with their permissions."""
    out = fill(tmp_path / "out")
    out.chmod(0o750)
    inode = (out / "checkpoint-1" / "optimizer.pt").stat().st_ino
    SYSTEMS[system](monkeypatch)
    check_output(out)
    model.save_pretrained(out)
    assert_filled(out)
    assert (out / "checkpoint-1" / "optimizer.pt").stat().st_ino == inode, "large files are not copied"
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    assert torch.equal(logits(load(out)), logits(model))


def test_a_run_into_a_directory_with_files(qwen, tmp_path):
    """Field case 2.5: oneshot with the same files in its output, and scores saved to a folder in it."""
    out = fill(tmp_path / "out")
    prune(qwen, out)
    assert_filled(out)
    assert load(out)


def test_a_tokenizer_that_was_saved_before(qwen, tmp_path):
    """Field case 2.5: the user's tokenizer and card are kept, and no file of another tokenizer is put beside it."""
    model = prune(qwen)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    tokenizer.add_tokens(["mine"])
    tokenizer.save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("my card")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    model.save_pretrained(tmp_path / "out")
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        *("config.json", "generation_config.json", "model.safetensors", "moe_coverage_report.json", "recipe.yaml")
    }
    assert "mine" in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    tokenizer.save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    assert "No tokenizer was saved" not in (tmp_path / "other" / "README.md").read_text()


def test_a_trainer(written, tmp_path):
    """Field case 2.5: checkpoints while it trains, save_model beside them, and save_model again after more steps."""
    data = [{"input_ids": row, "labels": row} for row in token_batches(samples=4, length=16)["input_ids"]]
    options = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, save_steps=1, learning_rate=1e-3, use_cpu=True, report_to=[]
    )
    trainer = Trainer(model=load(written), args=options, train_dataset=data)
    trainer.train()
    trainer.save_model()
    first = tensors(tmp_path / "out")[HEAD]
    assert torch.equal(tensors(tmp_path / "out" / "checkpoint-2")[HEAD], first)
    assert not torch.equal(tensors(tmp_path / "out" / "checkpoint-1")[HEAD], first)
    change(trainer.model)
    trainer.save_model()
    assert (tensors(tmp_path / "out")[HEAD] == 0.25).all()
    assert {"checkpoint-1", "checkpoint-2", "training_args.bin"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert load(directory)


def test_the_checkpoint_is_there_already(qwen, tmp_path):
    """Field case 2.5: output_dir, then save_pretrained to the same place; also of a model that was loaded from it."""
    model = prune(qwen, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    load(tmp_path / "out").save_pretrained(tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    with pytest.raises(CoverageError, match="has a complete ragged checkpoint already, made from"):
        prune(qwen, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(CoverageError, match="has an incomplete checkpoint already"):
        check_output(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("system", SYSTEMS)
def test_changed_weights_replace_the_checkpoint(model, tmp_path, monkeypatch, system):
    """Field case 2.5: in several files before and one after; other files stay, those of the old weights do not."""
    out = tmp_path / "out"
    model.save_pretrained(out, max_shard_size="400KB")
    fill(out)
    SYSTEMS[system](monkeypatch)
    loaded = change(load(out))
    loaded.save_pretrained(out)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert (tensors(out)[HEAD] == 0.25).all()
    assert_filled(out)
    loaded.config.max_position_embeddings = 99
    loaded.save_pretrained(out)
    assert config_json(out)["max_position_embeddings"] == 99


@pytest.mark.parametrize(
    "kind", ["unpruned", "config", "weights", "pickle", "adapter", "other widths", "quantized", "damaged entry"]
)
def test_another_model_is_there(model, qwen, tmp_path, kind):
    """Field case 2.5: found before calibration and before anything is written."""
    out = tmp_path / "out"
    out.mkdir()
    if kind == "unpruned":
        save_model(out)
    elif kind == "config":
        (out / "config.json").write_text('{"model_type": "llama"}')
    elif kind == "other widths":
        prune(qwen, out, sparsity=0.2)
    elif kind == "quantized":
        prune(qwen, out, quantize=True)
    elif kind == "damaged entry":
        model.save_pretrained(out)
        (out / "config.json").write_text((out / "config.json").read_text().replace('"version": 1', '"version": 7'))
    else:
        names = {"weights": "x.safetensors", "pickle": "pytorch_model.bin", "adapter": "adapter_model.safetensors"}
        save_file({"x": torch.zeros(1)}, out / names[kind])
    fill(out)
    before = snapshot(tmp_path)
    words = {
        "other widths": "complete ragged checkpoint already, with experts of other widths",
        "quantized": "complete ragged checkpoint already, with quantized weights and this model 16-bit ones",
    }
    with pytest.raises(CoverageError, match=words.get(kind, "has weights or a config that are not of this model")):
        model.save_pretrained(out)
    with pytest.raises(CoverageError, match=r"already, made from|not of this model"):
        prune(qwen, out)
    assert snapshot(tmp_path) == before


def test_a_process_inside_the_directory(model, tmp_path, monkeypatch):
    """Field case 2.5: it stays in a directory that exists."""
    out = fill(tmp_path / "out")
    monkeypatch.chdir(out / "logs")
    model.save_pretrained(out)
    assert Path.cwd() == out / "logs"
    assert (Path("..") / "config.json").is_file()
    assert_filled(out)
    assert load(out)


def test_a_directory_with_the_name_of_a_file(model, tmp_path):
    """Field case 2.5: stops before the user's directory or an earlier checkpoint is changed."""
    fill(tmp_path / "out")
    (tmp_path / "out" / "moe_coverage_report.json").mkdir()
    with pytest.raises(CoverageError, match=r"has a directory named moe_coverage_report\.json"):
        model.save_pretrained(tmp_path / "out")
    assert_filled(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_files_that_are_written_meanwhile(model, tmp_path, monkeypatch):
    """Field case 2.5: a logger adds a file between the links and the exchange."""
    out = fill(tmp_path / "out")
    exchange = merging._exchange

    def late(one, other):
        (out / "logs" / "late").write_text("event")
        (out / "new").mkdir()
        (out / "new" / "late").write_text("event")
        return exchange(one, other)

    monkeypatch.setattr(merging, "_exchange", late)
    model.save_pretrained(out)
    assert (out / "logs" / "late").read_text() == (out / "new" / "late").read_text() == "event"
    assert_filled(out)


@pytest.mark.parametrize("there", ["files", "checkpoint"])
@pytest.mark.parametrize(
    "moment", ["link 1", "link 9", "exchange", "exchanged", "replace 1", "replace 3", "replace 5"]
)
def test_a_killed_process_leaves_files_and_no_half_checkpoint(model, tmp_path, there, moment):
    """Field case 2.5: SIGKILL in the middle of merging, by an exchange of directories or file by file."""
    out = tmp_path / "out"
    if there == "checkpoint":
        model.save_pretrained(out)
    fill(out)
    change(model)
    step, _, number = moment.partition(" ")
    if (child := os.fork()) == 0:
        left = int(number or 1)

        def killing(module, name, after=False):
            real = getattr(module, name)

            def call(*args, **options):
                nonlocal left
                left -= 1
                if left == 0 and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args, **options)
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(module, name, call)

        save_to = staging._place
        if step == "replace":
            merging._exchange = lambda *_: False

        def place(*args):
            # write_entry renames a file as well
            {
                "link": lambda: killing(os, "link"),
                "exchange": lambda: killing(merging, "_exchange"),
                "exchanged": lambda: killing(merging, "_exchange", after=True),
                "replace": lambda: killing(os, "replace"),
            }[step]()
            save_to(*args)

        staging._place = place
        try:
            model.save_pretrained(out)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert {name: (out / name).read_text() for name in FOREIGN} == FOREIGN
    if (out / "config.json").exists():
        assert moment == "exchanged" or there == "checkpoint"
        assert bool((tensors(out)[HEAD] == 0.25).all()) == (moment == "exchanged")
        assert load(out)
    else:
        assert step == "replace" or there == "files"
        with pytest.raises(CoverageError, match="is not a pruned checkpoint"):
            load(out)
    if step == "replace":
        for name in ("model.safetensors", "model.safetensors.index.json"):
            (out / name).unlink(missing_ok=True)
    model.save_pretrained(out)
    assert_filled(out)
    assert (tensors(out)[HEAD] == 0.25).all()
