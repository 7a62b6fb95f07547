"""Numbers of ranks that would cut quantization groups stop with a clear error before an engine starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from moe_coverage_plugin.cli.checkpoint import read_checkpoint
from moe_coverage_plugin.cli.inspection import _summary
from moe_coverage_plugin.files import headers
from moe_coverage_plugin.files.headers import read_headers
from moe_coverage_plugin.manifest import CoverageError, Layout, Manifest, read_json
from moe_coverage_plugin.parallelism import rank_ranges
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.degrees import check_degrees
from moe_coverage_plugin.serving.local_files import LocalFiles
from tests.serving.engine import OPTIONS, checkpoint_path

LIMIT = 8
EXPERTS = "model.layers.3.mlp.experts"
DENSE = "model.layers.0.mlp.down_proj"
SHARED = "model.layers.3.mlp.shared_expert.down_proj"


def checkpoint(directory: Path, group_size: int | None, **channels: int) -> Path:
    """Files with the scales and shapes of 4-bit layers, each tensor in a file of its own."""
    (directory / "config.json").write_text("{}")
    names = {"dense": DENSE, "shared": SHARED, "expert": f"{EXPERTS}.0.down_proj"}
    for kind, width in channels.items():
        scale = torch.zeros(8, width // (group_size or width))
        save_file({f"{names[kind]}.weight_scale": scale}, directory / f"{kind}_scale.safetensors")
        save_file({f"{names[kind]}.weight_shape": torch.tensor([8, width])}, directory / f"{kind}_shape.safetensors")
    return directory


def check(directory: Path, layout: Layout, width: int, group_size: int | None, ranks: int, ours: bool = False) -> None:
    widths = [width, 0, width, 128] if layout == "ragged" else [width] * 4
    manifest = Manifest(layout, width, {EXPERTS: widths})
    strategy = "group" if group_size else "channel"
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "group_size": group_size}
    quantization = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    files = LocalFiles(read_json(directory / "config.json"), read_headers(directory)) if directory.exists() else None
    check_degrees(manifest, quantization, files, ranks, ranks, ours)


@pytest.mark.parametrize(("width", "group_size", "ranks"), [(768, 128, 4), (640, 128, 2), (896, 128, 2)])
def test_experts_whose_share_ends_within_a_group(tmp_path: Path, width: int, group_size: int, ranks: int) -> None:
    """Case 1, case 2, case 4: a share of an expert that ends within a group is served, or stops with a clear error.

    768 channels over four ranks leave 192, 640 over two 320, 896 over two 448, and none is a multiple of 128. Other
    servers stopped at the first request, at an assertion without a message, or in a worker whose log had the cause.
    """
    directory = checkpoint(tmp_path, group_size, expert=width)
    # our method assigns entire groups, to some ranks one more than to others
    check(directory, "ragged", width, group_size, ranks)
    shares = [stop - start for rank in range(ranks) for start, stop in rank_ranges([width], group_size, rank, ranks)]
    assert sum(shares) == width
    assert not any(share % group_size for share in shares)
    check(directory, "uniform", width, group_size, ranks, ours=True)
    with pytest.raises(
        CoverageError, match=rf"{ranks} ranks do not fit .* {width // ranks} channels of the {EXPERTS}"
    ):
        check(directory, "uniform", width, group_size, ranks)


def test_experts_of_one_width_are_shared_evenly(tmp_path: Path) -> None:
    """Case 2: vLLM asserts without a message that the ranks divide the one width of experts."""
    absent = tmp_path / "not downloaded yet"
    with pytest.raises(CoverageError, match=r"3 ranks .* 640 channels of the experts are not a multiple of it"):
        check(absent, "padded", 640, None, 3, ours=True)
    check(absent, "ragged", 640, None, 3, ours=True)


@pytest.mark.parametrize(
    ("kind", "name", "channels", "group_size", "ranks"),
    [
        ("dense", DENSE, 10944, 64, 2),
        ("dense", DENSE, 5472, 32, 2),
        ("shared", SHARED, 2816, 128, 4),
    ],
)
def test_layer_beside_the_experts_that_blocks_a_degree(
    tmp_path: Path, kind: str, name: str, channels: int, group_size: int, ranks: int
) -> None:
    """Case 5: dense first layers and shared experts have widths of their own; the error names the one that stops."""
    directory = checkpoint(tmp_path, group_size, expert=1408, **{kind: channels})
    check(directory, "ragged", 1408, group_size, 1)
    with pytest.raises(CoverageError, match=rf"{channels // ranks} channels of the {name} .* group size {group_size}"):
        check(directory, "ragged", 1408, group_size, ranks)


def test_scales_of_entire_rows_are_cut_between_packed_words(tmp_path: Path) -> None:
    """Field case 2.17: every rank keeps the scale of a row, but vLLM would start within a word of eight values."""
    directory = checkpoint(tmp_path, None, dense=10944, shared=2816)
    check(directory, "ragged", 1408, None, 8)
    with pytest.raises(CoverageError, match=r"684 channels of the .* are not a multiple of the packed word of 8"):
        check(directory, "ragged", 1408, None, 16)


def configure(name: str | Path, **options: Any) -> None:
    """Everything that vLLM does in the user's process before it starts another process."""
    arguments: dict[str, Any] = OPTIONS | {"distributed_executor_backend": "mp"} | options
    path = name if isinstance(name, Path) else checkpoint_path(name)
    EngineArgs(model=str(path), **arguments).create_engine_config()


@pytest.mark.engine
def test_cause_is_in_the_error_of_the_parent() -> None:
    """Case 4: two ranks would hold 192 of 384 channels of a shared expert each, and the user's process says so."""
    with pytest.raises(ValueError, match=r"2 ranks .* 192 channels of the .*shared_expert\.down_proj .* inspect"):
        configure("ragged_shared_w4a16", tensor_parallel_size=2)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["ragged_w4a16", "padded_fp32"])
def test_files_are_read_once_for_an_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 2.14: integrity and degrees are checked on one reading, until a file changes."""
    path = Path(shutil.copytree(checkpoint_path(name), tmp_path / name))
    reads: list[str] = []
    read_text, read_header = Path.read_text, headers._read_header
    monkeypatch.setattr(Path, "read_text", lambda file, **kwargs: reads.append(file.name) or read_text(file, **kwargs))
    monkeypatch.setattr(headers, "_read_header", lambda file: reads.append(file.name) or read_header(file))
    configure(path, tensor_parallel_size=2)
    assert reads.count("config.json") == reads.count("model.safetensors") == 1
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        configure(path, tensor_parallel_size=2)


@pytest.mark.engine
def test_degrees_that_fit() -> None:
    configure("ragged_w4a16_a64", tensor_parallel_size=2)
    configure("padded_fp32", tensor_parallel_size=2)


# of every layout and scheme; families whose other layers differ
LISTED = [
    *("ragged_fp32", "ragged_w4a16", "ragged_w4a16_a64", "ragged_by_channel", "ragged_asymmetric", "ragged_fp8"),
    *("ragged_float8_attention", "ragged_shared_w4a16", "ragged_three_ranks", "padded_fp32", "uniform_fp32"),
    "padded_w4a16",
]


@pytest.mark.engine
@pytest.mark.parametrize("name", LISTED)
def test_inspect_lists_what_the_engine_takes(name: str) -> None:
    """Field case 2.17: the two had rules of their own."""
    parallel = _summary(read_checkpoint(checkpoint_path(name)))["tensor_parallel"]
    taken = [degree for degree in range(1, LIMIT + 1) if is_taken(name, degree)]
    assert taken == [each for each in sorted(parallel["legal"] + parallel["legal_on_cpus_only"]) if each <= LIMIT]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["padded_w4a16", "padded_fp32", "ragged_w4a16"])
def test_inspect_lists_what_builds_for_gpus_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 2.17: such builds compute 4-bit experts of one width by their own kernels."""
    monkeypatch.setattr(compat, "lacks_w4a16_moe", lambda: False)
    parallel = _summary(read_checkpoint(checkpoint_path(name)))["tensor_parallel"]
    taken = [degree for degree in range(1, LIMIT + 1) if is_taken(name, degree)]
    assert taken == [each for each in parallel["legal"] if each <= LIMIT]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["padded_w4a16", "ragged_w4a16", "ragged_shared_fp32"])
def test_inspect_lists_what_the_engine_takes_with_entire_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths of experts, and their groups, limit no degree."""
    monkeypatch.setattr(compat, "lacks_w4a16_moe", lambda: False)
    monkeypatch.setattr(compat, "lacks_expert_parallel_moe", lambda: False)
    legal = _summary(read_checkpoint(checkpoint_path(name)))["expert_parallel"]["legal"]
    taken = [degree for degree in range(1, LIMIT + 1) if is_taken(name, degree, enable_expert_parallel=True)]
    assert taken == [each for each in legal if each <= LIMIT]


def is_taken(name: str, degree: int, **options: Any) -> bool:
    try:
        configure(name, tensor_parallel_size=degree, **options)
    except ValueError:
        return False
    return True
