"""All readers stop with a clear error at directories that are damaged, incomplete or forged."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_coverage_plugin import CoverageError, Manifest, load
from moe_coverage_plugin.cli import main
from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.files.weights import has_weights
from moe_coverage_plugin.manifest import INDEX_NAME, REPORT_NAME, checksum
from tests.checkpoint.runs import aligned, config_json, logits, prune, source

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in 4 bits and several files."""
    directory = tmp_path_factory.mktemp("directories")
    model = prune(source(directory / "model"), quantize=True)
    model.save_pretrained(directory / "out", max_shard_size="60KB")
    assert len(list((directory / "out").glob("model-*.safetensors"))) > 3
    return directory / "out"


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def serve(directory: Path) -> None:
    """Read what the serving half reads in the user's process, before an engine starts."""
    manifest = Manifest.from_checkpoint(directory)
    assert manifest is not None
    assert has_weights(directory)
    check_checkpoint(directory, manifest)


def assert_opens(path: Path, original: Path) -> None:
    """Check that all readers open a path, as what the original is."""
    serve(path)
    assert main(["inspect", str(path)]) == 0
    assert torch.equal(logits(aligned(load(path))), logits(aligned(load(original))))


def assert_stops(directory: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that load(), the serving half and the command line raise an error of one line and write nothing."""
    before = sorted(directory.parent.rglob("*"))
    for opened in (load, serve):
        with pytest.raises(CoverageError, match=message) as caught:
            opened(directory)
        assert "\n" not in str(caught.value)
    capsys.readouterr()
    written = directory.parent / "inspected.json"
    assert main(["inspect", str(directory), "--json", str(written), "--pictures", str(directory.parent / "p")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)
    assert printed.err.count("\n") == 1
    assert sorted(directory.parent.rglob("*")) == before


def rename_in_index(directory: Path, name: Any) -> None:
    """Replace the name of the first file in the index."""
    index = json.loads((directory / INDEX_NAME).read_text())
    first = first_shard(directory).name
    index["weight_map"] = {key: name if file == first else file for key, file in index["weight_map"].items()}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def move_out(directory: Path) -> Path:
    """Move the first file out of the directory, to a place where it is readable."""
    return Path(shutil.move(first_shard(directory), directory.parent / "outside.safetensors"))


def parent_path(directory: Path) -> None:
    rename_in_index(directory, f"../{move_out(directory).name}")


def absolute_path(directory: Path) -> None:
    rename_in_index(directory, str(move_out(directory)))


def absolute_path_back_in(directory: Path) -> None:
    rename_in_index(directory, str(first_shard(directory)))


def detour(directory: Path) -> None:
    rename_in_index(directory, f"../{directory.name}/{first_shard(directory).name}")


def linked_folder(directory: Path) -> None:
    outside = move_out(directory)
    (directory / "folder").symlink_to(outside.parent)
    rename_in_index(directory, f"folder/{outside.name}")


@pytest.mark.parametrize(
    "trick",
    [
        parent_path,
        absolute_path,
        absolute_path_back_in,
        detour,
        linked_folder,
        lambda directory: rename_in_index(directory, first_shard(directory).name + "\0.safetensors"),
        lambda directory: rename_in_index(directory, "\n.safetensors"),
        lambda directory: rename_in_index(directory, ".."),
        lambda directory: rename_in_index(directory, ""),
        lambda directory: rename_in_index(directory, "config.json"),
        lambda directory: rename_in_index(directory, None),
        lambda directory: rename_in_index(directory, ["model.safetensors"]),
        lambda directory: rename_in_index(directory, {"a": {}}),
    ],
)
def test_names_in_the_index_of_no_file_in_the_directory(
    copy: Path, trick: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    trick(copy)
    assert_stops(copy, r"lists .*, but only safetensors files in its own directory are allowed", capsys)


def link_out(directory: Path) -> None:
    name, outside = first_shard(directory).name, move_out(directory)
    (directory / name).symlink_to(outside)


def link_out_twice(directory: Path) -> None:
    name, outside = first_shard(directory).name, move_out(directory)
    (directory / "between").symlink_to(outside)
    (directory / name).symlink_to("between")


def link_out_without_an_index(directory: Path) -> None:
    (directory / INDEX_NAME).unlink()
    link_out(directory)


@pytest.mark.parametrize("trick", [link_out, link_out_twice, link_out_without_an_index])
def test_links_out_of_the_directory(copy: Path, trick: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    trick(copy)
    assert_stops(copy, r"is a link to .*outside\.safetensors, outside of .*: copy the file itself", capsys)


def test_links_within_the_directory_and_to_it_are_followed(copy: Path, sharded: Path, tmp_path: Path) -> None:
    file = first_shard(copy)
    (copy / "files").mkdir()
    file.rename(copy / "files" / file.name)
    file.symlink_to(Path("files") / file.name)
    (tmp_path / "link").symlink_to(copy)
    assert_opens(tmp_path / "link", sharded)


@pytest.fixture
def snapshot(sharded: Path, tmp_path: Path) -> Path:
    """A revision in the Hugging Face cache, whose files are links to blobs beside all revisions, named by hashes."""
    repository = tmp_path / "cache" / "hub" / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(file for file in sharded.iterdir() if file.is_file()):
        shutil.copyfile(file, blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    return snapshot


def directly(snapshot: Path, _: Path) -> Path:
    return snapshot


def by_a_link(snapshot: Path, workspace: Path) -> Path:
    (workspace / "mymodel").symlink_to(snapshot)
    return workspace / "mymodel"


def by_a_relative_link(snapshot: Path, workspace: Path) -> Path:
    (workspace / "models").mkdir()
    (workspace / "models" / "mymodel").symlink_to(os.path.relpath(snapshot, workspace / "models"))
    return workspace / "models" / "mymodel"


def by_a_link_to_a_link(snapshot: Path, workspace: Path) -> Path:
    (workspace / "second").symlink_to(by_a_link(snapshot, workspace))
    return workspace / "second"


def by_a_link_within_the_cache(snapshot: Path, workspace: Path) -> Path:
    (snapshot.parent / "main").symlink_to(snapshot.name)
    (workspace / "mymodel").symlink_to(snapshot.parent / "main")
    return workspace / "mymodel"


def in_a_cache_that_is_a_link(snapshot: Path, workspace: Path) -> Path:
    (workspace / "home").symlink_to(workspace / "cache")
    return workspace / "home" / snapshot.relative_to(workspace / "cache")


def by_a_link_into_a_cache_that_is_a_link(snapshot: Path, workspace: Path) -> Path:
    (workspace / "mymodel").symlink_to(in_a_cache_that_is_a_link(snapshot, workspace))
    return workspace / "mymodel"


def in_a_download_of_links(snapshot: Path, workspace: Path) -> Path:
    """What ``local_dir`` was in earlier releases: a directory of links into the cache."""
    (workspace / "local").mkdir()
    for file in snapshot.iterdir():
        (workspace / "local" / file.name).symlink_to(os.path.realpath(file))
    return workspace / "local"


@pytest.mark.parametrize(
    "path",
    [
        directly,
        by_a_link,
        by_a_relative_link,
        by_a_link_to_a_link,
        by_a_link_within_the_cache,
        in_a_cache_that_is_a_link,
        by_a_link_into_a_cache_that_is_a_link,
        in_a_download_of_links,
    ],
)
def test_links_of_the_hugging_face_cache_are_followed(
    path: Callable[[Path, Path], Path], sharded: Path, snapshot: Path, tmp_path: Path
) -> None:
    """Field case 2.12: a path that leads to a revision in the cache opens as the revision itself does."""
    assert_opens(path(snapshot, tmp_path), sharded)


def test_a_relative_path_from_within_a_linked_revision(
    sharded: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 2.12: the current directory is a link."""
    monkeypatch.chdir(by_a_link(snapshot, tmp_path))
    assert_opens(Path("."), sharded)


@pytest.mark.parametrize("in_cache", [False, True])
def test_links_to_files_of_other_names_are_not_followed(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_cache: bool
) -> None:
    """Field case 2.12: a blob that no revision has under this name, and a revision whose file is elsewhere."""
    directory = snapshot if in_cache else in_a_download_of_links(snapshot, tmp_path)
    file = first_shard(directory)
    outside = tmp_path / ("outside" if in_cache else "cache/hub/models--a--b/blobs/other")
    shutil.move(os.path.realpath(file), outside)
    file.unlink()
    file.symlink_to(outside)
    (tmp_path / "mymodel").symlink_to(directory)
    for path in (directory, tmp_path / "mymodel"):
        assert_stops(path, r"is a link to .*, outside of .*: copy the file itself", capsys)


@pytest.mark.parametrize("keep", [0, 7, 200, 0.5, -1])
def test_a_truncated_shard(copy: Path, keep: float, capsys: pytest.CaptureFixture[str]) -> None:
    file = first_shard(copy)
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    assert_stops(copy, rf"{re.escape(file.name)} cannot be read", capsys)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_missing_shard(copy: Path, dangling: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = first_shard(copy)
    file.unlink()
    if dangling:
        file.symlink_to("absent")
    assert_stops(copy, rf"lacks {re.escape(file.name)}, which is one of \d+ files", capsys)


@pytest.mark.parametrize(
    "make", [lambda file: os.mkfifo(file), lambda file: file.mkdir(), lambda file: file.symlink_to(file.name)]
)
def test_a_shard_that_is_not_a_file(copy: Path, make: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    file = first_shard(copy)
    file.unlink()
    make(file)
    assert_stops(copy, rf"lacks {re.escape(file.name)}", capsys)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000, "\xff"]
)
def test_a_damaged_index(copy: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / INDEX_NAME).write_bytes(text.encode("latin-1"))
    assert_stops(copy, rf"{re.escape(INDEX_NAME)} cannot be read", capsys)


def test_a_shard_of_other_widths(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors and widths that disagree, as in files of two checkpoints."""
    file = next(file for file in sorted(copy.glob("*.safetensors")) if packed(load_file(file)))
    tensors = load_file(file)
    name = packed(tensors)[0]
    save_file(tensors | {name: tensors[name][:, :-4].contiguous()}, file, {"format": "pt"})
    assert_stops(copy, rf"{re.escape(name)} has shape", capsys)


def packed(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.endswith("down_proj.weight_packed") and ".experts." in name]


# --- the entry


def entry_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["quantization_config"]["moe_coverage"]


def test_a_flipped_byte_in_the_entry(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A digit of the width before pruning, which no tensor contradicts."""
    text = (copy / "config.json").read_text()
    start = text.index('"intermediate_size": 128', text.index('"layout"') - 1_000)
    assert text.index('"moe_coverage"') < start
    (copy / "config.json").write_text(text[:start] + text[start:].replace("128", "160", 1))
    assert_stops(copy, "does not match its sha256", capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has schema version 2, this release reads 1"),
        ({"version": True}, "has schema version True"),
        ({"version": 1.0}, r"has schema version 1\.0"),
        ({"version": None}, "has schema version None"),
        ({"sha256": None}, "has no sha256"),
        ({"sha256": "0" * 64}, "does not match its sha256"),
        ({"provenance": []}, "has values of wrong types"),
        ({"block_size": True}, "has values of wrong types"),
        ({"intermediate_size": 128.0}, "has values of wrong types"),
        ({"layout": []}, r"layout is \[\], known are"),
        ({"layout": "padded"}, "layout 'padded' needs one width"),
        ({"widths": {"a": [True]}}, "has width True"),
        ({"widths": {"a": [0, 0]}}, "names a layer without experts, a"),
        ({"widths": {"a": []}}, "names a layer without experts, a"),
    ],
    ids=str,
)
def test_an_entry_with_wrong_values(
    copy: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_json(copy)
    entry = entry_of(config)
    entry.update(changes)
    if "sha256" not in changes:
        entry["sha256"] = checksum(entry)
    (copy / "config.json").write_text(json.dumps(config))
    assert_stops(copy, message, capsys)


def test_widths_that_disagree_with_the_tensors(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_json(copy)
    entry = entry_of(config)
    layer, widths = next(iter(entry["widths"].items()))
    expert = widths.index(max(widths))
    widths[expert] -= entry["block_size"]
    entry["sha256"] = checksum(entry)
    (copy / "config.json").write_text(json.dumps(config))
    assert_stops(copy, rf"{re.escape(layer)}\.{expert}\.\w+\.weight_packed has shape", capsys)


# --- files that transformers reads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "gloat32"}, "has no attribute 'gloat32'"),
        # transformers stops where it writes the config as text, which is left out in tests; then we do
        ({"dtype": "nn"}, r"config\.json (describes nothing|has dtype)"),
        ({"model_type": "qwen3_mof"}, "qwen3_mof"),
        ({"model_type": None}, r"config\.json describes nothing that transformers"),
        ({"model_type": "llama"}, "LlamaForCausalLM has no mixture-of-experts layer"),
        ({"hidden_size": "no"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads 0, 4 was written"),
        ({"num_local_experts": 9}, "num_local_experts 9, 8 was written"),
        ({"auto_map": 3}, r"config\.json describes nothing"),
        ({"rope_parameters": 3}, r"config\.json describes nothing"),
    ],
    ids=str,
)
def test_a_config_that_transformers_cannot_read(copy: Path, changes: dict[str, Any], message: str) -> None:
    (copy / "config.json").write_text(json.dumps(config_json(copy) | changes))
    with pytest.raises(CoverageError, match=message) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "groups", [3, {"group_0": 3}, {"group_0": {"targets": ["Linear"], "weights": {"num_bits": "x"}}}]
)
def test_a_quantization_that_cannot_be_read(copy: Path, groups: Any) -> None:
    config = config_json(copy)
    config["quantization_config"]["config_groups"] = groups
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoverageError, match=r"config\.json") as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [REPORT_NAME, "generation_config.json"])
def test_a_damaged_companion(copy: Path, name: str) -> None:
    (copy / name).write_text("{")
    with pytest.raises(CoverageError, match=re.escape(name)) as caught:
        load(copy)
    assert "\n" not in str(caught.value)
