"""What a run writes: a complete checkpoint described by its config, or nothing if it fails."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.checkpoint.entry import write_entry
from moe_coverage_plugin.checkpoint.staging import check_output
from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import REPORT_NAME, SCORES_NAME
from tests import processes
from tests.checkpoint.runs import BLOCK, config_json, prune, source, tensors

pytestmark = pytest.mark.slow

MODULE_TENSORS = ("weight", "weight_packed", "weight_scale", "weight_shape", "bias")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return source(tmp_path_factory.mktemp("source") / "qwen2_moe", "qwen2_moe")


@pytest.fixture(scope="module", params=[False, True], ids=["16bit", "w4a16"])
def written(request, shared, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "checkpoint"
    prune(shared, output, quantize=request.param)
    return output, request.param


def test_config_keeps_what_engines_read(written, shared):
    """Case 26: the number of experts in the config is unchanged, since kernels of routers stop at odd numbers."""
    output, quantized = written
    before, after = config_json(shared), config_json(output)
    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    for key in before.keys() - {"moe_intermediate_size", "quantization_config", "transformers_version"}:
        assert after[key] == before[key], key
    assert after["moe_intermediate_size"] == manifest.declared_width
    assert len(manifest.distinct_widths) > 1, "with one width this test shows nothing"
    assert manifest.removed_experts
    assert {len(widths) for widths in manifest.widths.values()} == {after["num_experts"]}
    assert manifest.declared_width in manifest.distinct_widths
    quantization = after["quantization_config"]
    assert quantization["quant_method"] == "moe-coverage-plugin"
    assert bool(quantization["config_groups"]) == quantized
    assert quantization["moe_coverage"]["intermediate_size"] == before["moe_intermediate_size"]
    assert manifest.block_size == BLOCK


def test_nothing_that_routes_is_quantized(written):
    """Case 9: neither a router nor the gate of a shared expert is in 4 bits on disk."""
    output, quantized = written
    names = tensors(output)
    stored_as = {name.rpartition(".")[0]: name.rpartition(".")[2] for name in names}
    for module in stored_as:
        if module.endswith((".gate", ".shared_expert_gate", "lm_head")):
            assert f"{module}.weight" in names
            assert f"{module}.weight_packed" not in names
    assert any(name.endswith("weight_packed") for name in names) == quantized


def test_tensors_have_the_widths_of_the_manifest(written):
    output, quantized = written
    manifest, found = Manifest.from_checkpoint(output), tensors(output)
    assert manifest is not None
    for path, widths in manifest.widths.items():
        for expert, width in enumerate(widths):
            stored = {name for name in found if name.startswith(f"{path}.{expert}.")}
            if width == 0:
                assert not stored
                continue
            for projection in ("gate_proj", "up_proj", "down_proj"):
                prefix = f"{path}.{expert}.{projection}"
                shape = [128, width] if projection == "down_proj" else [width, 128]
                if not quantized:
                    assert list(found[f"{prefix}.weight"].shape) == shape
                    continue
                assert found[f"{prefix}.weight_shape"].tolist() == shape
                assert list(found[f"{prefix}.weight_packed"].shape) == [shape[0], shape[1] // 8]
                assert list(found[f"{prefix}.weight_scale"].shape) == [shape[0], shape[1] // BLOCK]
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_report_and_recipe_are_written(written):
    """Case 29: seed, versions, hash of the data and recipe are in the checkpoint."""
    output, quantized = written
    report = json.loads((output / REPORT_NAME).read_text())
    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    assert {name: layer["widths"] for name, layer in report["layers"].items()} == manifest.widths
    assert {"model", "recipe", "calibration_sha256", "versions", "torch_seed"} <= manifest.provenance.keys()
    recipe = yaml.safe_load((output / "recipe.yaml").read_text())
    named = {name for stage in recipe.values() for group in stage.values() for name in group}
    ours = {"AttributionModifier", "CoverageModifier", "AlignmentModifier", "ChannelPruningModifier"}
    assert named == ours | ({"QuantizationModifier"} if quantized else set())
    assert not list(output.parent.glob(".*")), "no partial directory stays"
    assert (output / SCORES_NAME).is_file()
    assert [file.name for file in output.glob("*.safetensors")] == ["model.safetensors"], "engines load all of them"
    assert (output / "tokenizer.json").is_file()
    assert (output / "generation_config.json").is_file() or (output / "config.json").is_file()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007], ids=oct)
def test_permissions_follow_the_umask(written, tmp_path, umask):
    """Field case 2.13: of every file and directory, so that a server of another user or group can read them."""
    before = os.umask(umask)
    try:
        load(written[0]).save_pretrained(tmp_path / "out")
        modes = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]}
    finally:
        os.umask(before)
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in modes}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007], ids=oct)
def test_other_files_follow_the_umask(tmp_path, umask):
    """Field case 2.13: scores, pages and results of the command line."""
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new" / "page.html", b"page")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "page.html").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask


def test_files_of_a_run_follow_the_umask(written):
    """Field case 2.13: with scores, tokenizer and recipe."""
    umask = os.umask(0)
    os.umask(umask)
    paths = [written[0], *written[0].rglob("*")]
    assert {"model.safetensors", "scores.safetensors", "tokenizer.json", "moe_coverage"} <= {
        path.name for path in paths
    }
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "deepseek_v2"])
def test_only_experts_are_changed(tmp_path, family):
    """Case 5: dense first layers and shared experts, which have widths of their own, are unchanged."""
    prune(source(tmp_path / "in", family), tmp_path / "out")
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    others = {name for name in before if ".experts." not in name}
    assert any("shared_expert" in name for name in others)
    assert family == "qwen2_moe" or "model.layers.0.mlp.down_proj.weight" in others
    assert {name for name in after if ".experts." not in name} == others
    for name in others:
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(after[name], before[name].masked_fill(after[name].isinf(), float("-inf")))
        else:
            assert torch.equal(after[name], before[name]), name


def test_width_of_a_nested_config(tmp_path):
    """Case 28: the width of a nested language model is changed in its own part of the config only."""
    vision = {"intermediate_size": 256, "moe_intermediate_size": 128}
    text = {"moe_intermediate_size": 128, "intermediate_size": 256, "num_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vision_config": vision, "hidden_size": 8}))
    manifest = Manifest("ragged", 128, {"model.layers.0.mlp.experts": [96, 32]})
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    write_entry(tmp_path, manifest, quantized=False)
    after = config_json(tmp_path)
    assert after["text_config"] == text | {"moe_intermediate_size": 32}
    assert after["vision_config"] == vision
    assert "moe_intermediate_size" not in after
    stored = Manifest.from_checkpoint(tmp_path)
    assert stored is not None
    assert stored.widths == manifest.widths


@pytest.mark.parametrize("layout", ["padded", "uniform"])
def test_layouts_of_one_width(qwen, tmp_path, layout):
    prune(qwen, tmp_path / "out", layout, min_width=0)
    manifest = Manifest.from_checkpoint(tmp_path / "out")
    assert manifest is not None
    assert manifest.layout == layout
    (width,) = manifest.distinct_widths
    assert config_json(tmp_path / "out")["moe_intermediate_size"] == width
    shapes = {tuple(t.shape) for name, t in tensors(tmp_path / "out").items() if ".experts." in name}
    assert shapes == {(width, 128), (128, width)}


def test_the_user_saves_what_oneshot_saves(qwen, tmp_path):
    model = prune(qwen, tmp_path / "by_oneshot")
    model.save_pretrained(tmp_path / "by_user")
    again = prune(qwen)
    again.save_pretrained(str(tmp_path / "later"))
    one = tensors(tmp_path / "by_oneshot")
    for other in ("by_user", "later"):
        found = tensors(tmp_path / other)
        assert found.keys() == one.keys()
        assert all(torch.equal(tensor, one[name]) for name, tensor in found.items())
        assert config_json(tmp_path / other) == config_json(tmp_path / "by_oneshot")
        names = {path.name for path in (tmp_path / other).iterdir()}
        assert names >= {path.name for path in (tmp_path / "by_oneshot").iterdir()}


def test_sharded(qwen, tmp_path):
    model = prune(qwen)
    model.save_pretrained(tmp_path / "out", max_shard_size="400KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "out").keys()


# --- failures ---


@pytest.fixture(scope="module")
def pruned(qwen):
    return prune(qwen)


def assert_absent(target: Path) -> None:
    assert not target.exists()
    assert not list(target.parent.iterdir()), "an error cleans up"


def test_push_to_hub_stops(pruned, tmp_path):
    with pytest.raises(CoverageError, match="push_to_hub"):
        pruned.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert_absent(tmp_path / "out")


def test_an_empty_directory_is_used(pruned, tmp_path):
    (tmp_path / "out").mkdir()
    pruned.save_pretrained(tmp_path / "out")
    assert load(tmp_path / "out")


def test_a_file_in_the_way(pruned, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        with pytest.raises(CoverageError, match=r"exists and is not a directory|cannot be created"):
            pruned.save_pretrained(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_the_output_is_checked_before_calibration(qwen, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CoverageError, match="cannot be created"):
        prune(qwen, tmp_path / "file" / "out")


@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_a_link_is_followed(qwen, tmp_path, there):
    """A link to an empty directory, which the checkpoint replaces, or to a directory that does not exist yet."""
    (tmp_path / "link").symlink_to(Path("disk") / "out")
    if there:
        (tmp_path / "disk" / "out").mkdir(parents=True)
    prune(qwen, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert load(tmp_path / "link")


def test_links_in_a_circle(tmp_path):
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for target in ("one", "one/out"):
        with pytest.raises(CoverageError, match=r"exists and is not a directory|cannot be created"):
            check_output(tmp_path / target)


@pytest.mark.parametrize("spelt", [".", "{}", "../{name}"])
def test_the_current_directory(pruned, tmp_path, monkeypatch, spelt):
    """The checkpoint would replace it, and processes would stay in a directory that was deleted."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    target = Path(spelt.format(tmp_path / "here", name="here"))
    for check in (check_output, pruned.save_pretrained):
        with pytest.raises(CoverageError, match=r"here is the current directory, .*: name a new directory in it"):
            check(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]
    check_output(target / "new")


MOUNTED = """
import ctypes, os, sys
from pathlib import Path
from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.checkpoint.staging import check_output
target, system = Path(sys.argv[1]), ctypes.CDLL(None)
identity = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
new_user, new_mounts = 0x10000000, 0x00020000
if system.unshare(new_user | new_mounts):
    sys.exit(CANNOT_MOUNT)
for file, text in identity.items():
    Path("/proc/self", file).write_text(text)
if system.mount(b"none", bytes(target), b"tmpfs", 0, b"size=4m"):
    sys.exit(CANNOT_MOUNT)
try:
    check_output(target)
except CoverageError as error:
    print(error)
check_output(target / "new", needed_bytes=2**20)
try:
    check_output(target / "new", needed_bytes=2**23)
except CoverageError as error:
    print(error)
"""
CANNOT_MOUNT = 77


def test_a_mount_point(tmp_path):
    """Volumes of containers are mounted empty; the free space of a directory in one is that of its disk."""
    (tmp_path / "out").mkdir()
    done = processes.run("-c", MOUNTED.replace("CANNOT_MOUNT", str(CANNOT_MOUNT)), tmp_path / "out")
    if done.returncode == CANNOT_MOUNT:
        pytest.skip("this user cannot mount a file system")
    assert done.returncode == 0, done.stderr
    mount_point, too_large = done.stdout.splitlines()
    assert "out is a mount point" in mount_point
    assert "name a new directory in it" in mount_point
    assert "needs about 0.0 GiB" in too_large


@pytest.fixture
def closed():
    """A directory that is not writable, with an empty directory in it that is."""
    with tempfile.TemporaryDirectory() as directory:
        closed = Path(directory) / "closed"
        (closed / "out").mkdir(parents=True)
        (closed / "out").chmod(0o777)
        closed.chmod(0o555)
        Path(directory).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield closed
        finally:
            os.seteuid(user)
            closed.chmod(0o755)


def test_a_place_that_is_not_writable(closed):
    for target in (closed / "out", closed / "new", closed / "new" / "deep", Path("/proc/out")):
        with pytest.raises(CoverageError, match=r"cannot be created: (\S*/closed|/proc) is not writable"):
            check_output(target)
    check_output(closed / "out" / "new")
    assert not any((closed / "out").iterdir()), "a check leaves no file"


def test_too_little_disk_space(tmp_path):
    with pytest.raises(CoverageError, match="GiB free"):
        check_output(tmp_path / "out", needed_bytes=2**60)


@pytest.mark.parametrize("call", ["first", "last", "replace"])
def test_a_full_disk_leaves_nothing(pruned, tmp_path, monkeypatch, call):
    """Errors of the operating system at the first file, at the last file, and at the rename."""
    full = OSError(28, "No space left on device")
    real_open, real_replace = Path.open, os.replace
    written: list[str] = []

    def failing_open(self, mode="r", *args, **kwargs):
        if "w" in mode and self.name == REPORT_NAME:
            raise full
        return real_open(self, mode, *args, **kwargs)

    def failing_replace(src, dst):
        written.append(str(dst))
        if Path(dst) == tmp_path / "out":
            raise full
        return real_replace(src, dst)

    def failing_weights(*args, **kwargs):
        raise full

    if call == "first":
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", failing_weights)
    elif call == "last":
        monkeypatch.setattr(Path, "open", failing_open)
    else:
        monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="No space left"):
        pruned.save_pretrained(tmp_path / "out")
    assert_absent(tmp_path / "out")
    monkeypatch.undo()
    pruned.save_pretrained(tmp_path / "out")
    assert load(tmp_path / "out")


KILLED = """
import sys
import torch
torch.set_num_threads(1)
from tests.checkpoint.runs import prune
from pathlib import Path
model = prune(Path(sys.argv[1]))
for number in range(100):
    model.save_pretrained(sys.argv[2] + "/" + str(number))
"""


def test_a_killed_process_leaves_complete_checkpoints_only(qwen, tmp_path):
    """SIGKILL at an arbitrary moment while checkpoints are written one after another."""
    process = processes.start("-c", KILLED, qwen, tmp_path)
    while not (tmp_path / "3").exists():
        assert process.returncode is None, process.stderr[-2000:]
        time.sleep(0.0137)
    process.kill()
    process.wait()
    complete = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(complete) >= 3
    for path in complete:
        load(path)
    assert all(path.name.endswith(".partial") for path in tmp_path.iterdir() if path.name.startswith("."))
