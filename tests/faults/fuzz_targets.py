"""Fuzz targets: readers of checkpoint files, called with damaged files. Each target takes any bytes as its choices.

For hypothesis (``test_fuzz.py``), and by hand for the coverage-guided fuzzer atheris if it is installed:

    PYTHONPATH=. python tests/faults/fuzz_targets.py manifest -runs=100000
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import LENGTH_BYTES, NO_DIGEST, load_scores, save_scores
from moe_coverage_plugin.files.weights import weight_files
from moe_coverage_plugin.manifest import CHECKSUM_KEY, CONFIG_KEY, INDEX_NAME, CoverageError, Manifest, checksum

ODD: list[Any] = [None, True, False, -1, 0, 1, 1.0, 64, 10**30, 0.5, float("nan"), float("inf"), "", "no", "../x"]
ODD += ["/etc/passwd", "a\0.safetensors", "\ud800", [], [[]], {}, {"": 1}, [1] * 9, "[" * 9]
MOST_EDITS = 4
SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


class Choices:
    """Choices that are read from bytes; zero when there are no more bytes."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def below(self, bound: int) -> int:
        """Return a number of at least 0 and below ``bound``."""
        size = (max(bound - 1, 1).bit_length() + 7) // 8
        drawn = self.data[self.place : self.place + size]
        self.place += size
        return int.from_bytes(drawn, "little") % max(bound, 1)


def damaged_bytes(original: bytes, choices: Choices) -> bytes:
    """Return the file with some of its bytes changed, removed, repeated or moved."""
    data = original
    for _ in range(1 + choices.below(MOST_EDITS)):
        place, length = choices.below(len(data) + 1), 1 + choices.below(64)
        head, piece, tail = data[:place], data[place : place + length], data[place + length :]
        match choices.below(6):
            case 0:
                data = head + bytes(byte ^ (1 << choices.below(8)) for byte in piece[:1]) + piece[1:] + tail
            case 1:
                data = head + bytes([choices.below(256)]) + piece[1:] + tail
            case 2:
                data = head + tail
            case 3:
                data = head + piece + piece + tail
            case 4:
                data = head
            case _:
                data = piece + head + tail
    return data


def damaged_value(value: Any, choices: Choices) -> Any:
    """Return a JSON value with one part replaced, removed, renamed, repeated or exchanged for another part."""
    if isinstance(value, dict) and value and choices.below(8):
        key = sorted(value)[choices.below(len(value))]
        others = {other: inner for other, inner in value.items() if other != key}
        match choices.below(6):
            case 0:
                return others
            case 1:
                return others | {key[:-1] + "x": value[key]}
            case 2:
                return value | {key: value[sorted(value)[choices.below(len(value))]]}
            case _:
                return value | {key: damaged_value(value[key], choices)}
    if isinstance(value, list) and value and choices.below(8):
        place = choices.below(len(value))
        match choices.below(5):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value[:place] + value[place : place + 1] + value[place:]
            case _:
                return [*value[:place], damaged_value(value[place], choices), *value[place + 1 :]]
    if type(value) is int and choices.below(2):
        return value + choices.below(256) - 128
    return ODD[choices.below(len(ODD))]


def damaged_json(value: Any, choices: Choices) -> Any:
    for _ in range(1 + choices.below(MOST_EDITS)):
        value = damaged_value(value, choices)
    return value


# --- the entry in config.json


def original_manifest() -> Manifest:
    widths = {f"model.layers.{layer}.mlp.experts": [64, 0, 128 - 32 * (layer % 3), 96] for layer in (1, 2, 10)}
    provenance = {"model": "a/b", "versions": {"torch": "2"}, "calibration_batches": 4, "recipe": [{"sparsity": 0.25}]}
    tokens = {name: [900, 3, 0, 77] for name in list(widths)[1:]}
    return Manifest("ragged", 256, widths, 32, provenance, tokens=tokens)


def original_config() -> dict[str, Any]:
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "quantization_config": quantization | {CONFIG_KEY: original_manifest().to_entry()},
    }


def fuzz_manifest(directory: Path, data: bytes) -> bool:
    """Return whether a damaged ``config.json`` was read; it may be only if its entry equals the original."""
    choices, config = Choices(data), original_config()
    if choices.below(2):
        content = damaged_bytes(json.dumps(config, indent=2, sort_keys=True).encode(), choices)
    else:
        intact_entry = choices.below(2)
        entry = config["quantization_config"][CONFIG_KEY]
        config["quantization_config"][CONFIG_KEY] = entry if intact_entry else damaged_json(entry, choices)
        content = json.dumps(damaged_json(config, choices) if intact_entry else config).encode()
    (directory / "config.json").write_bytes(content)
    try:
        found = Manifest.from_checkpoint(directory)
    except CoverageError as error:
        _assert_sentence(error)
        return False
    # without an entry callers stop, because the directory is not a pruned checkpoint
    assert found is None or found == original_manifest(), content
    return found is not None


def fuzz_forged_manifest(directory: Path, data: bytes) -> bool:
    """Return whether an entry with changes and a correct checksum was read; then it can be written again."""
    entry = damaged_json(original_manifest().to_entry(), Choices(data))
    if isinstance(entry, dict):
        entry[CHECKSUM_KEY] = checksum(entry)
    try:
        found = Manifest.from_quantization_config({CONFIG_KEY: entry})
    except CoverageError as error:
        _assert_sentence(error)
        return False
    if found is None:
        return False
    assert found.declared_width >= 1
    assert all(0 <= width <= found.intermediate_size for widths in found.widths.values() for width in widths)
    again = Manifest.from_quantization_config({CONFIG_KEY: found.to_entry()})
    assert again is not None
    # compared as text, because a NaN in the provenance does not equal itself
    assert json.dumps(again.to_entry()) == json.dumps(found.to_entry())
    return True


# --- the index of weight files


def fuzz_index(directory: Path, data: bytes) -> bool:
    """Return whether a damaged index was read; it may list only files of the directory."""
    choices = Choices(data)
    for name in SHARDS:
        (directory / name).touch()
    weight_map = {f"model.layers.{number}.weight": SHARDS[number % 3] for number in range(5)}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    if choices.below(2):
        content = damaged_bytes(json.dumps(index, indent=2).encode(), choices)
    else:
        content = json.dumps(damaged_json(index, choices)).encode()
    (directory / INDEX_NAME).write_bytes(content)
    try:
        files = weight_files(directory)
    except CoverageError as error:
        _assert_sentence(error)
        return False
    assert {file.name for file in files} <= set(SHARDS)
    assert all(file.parent == directory for file in files)
    return True


# --- score files


def original_scores() -> tuple[AttributionScores, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    tokens_LE = torch.arange(6).reshape(2, 3)
    scores = AttributionScores(
        names, [1, 2], "fisher", draw(2, 3, 4), draw(2, 3), draw(2, 3), tokens_LE, draw(2, 3), layer_loss_L=draw(2)
    )
    return scores, {"model": "a/b", "calibration_batches": 4}


@cache
def original_score_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "scores.safetensors"
        save_scores(path, *original_scores())
        return path.read_bytes()


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the tensors of a safetensors file."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    return json.loads(data[LENGTH_BYTES:end]), data[end:]


def joined(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + tensors


def fuzz_scores(directory: Path, data: bytes) -> bool:
    """Return whether a damaged score file was read; it may be only if its content equals the original."""
    choices = Choices(data)
    if choices.below(2):
        content = damaged_bytes(original_score_file(), choices)
    else:
        header, tensors = split(original_score_file())
        content = joined(damaged_json(header, choices), tensors)
    found = _read_scores(directory, content)
    if found is None:
        return False
    (scores, provenance), (expected, measured_on) = found, original_scores()
    assert provenance == measured_on
    for field in fields(AttributionScores):
        one, other = getattr(scores, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other, field.name
    return True


def fuzz_forged_scores(directory: Path, data: bytes) -> bool:
    """Return whether a score file with changes and a correct checksum was read; then it is valid for planning."""
    choices = Choices(data)
    header, tensors = split(original_score_file())
    tensors = damaged_bytes(tensors, choices) if choices.below(3) == 0 else tensors
    header = header if choices.below(4) == 0 else damaged_json(header, choices)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get("names"), str) and choices.below(2):
        key = ("names", "top_k", "provenance")[choices.below(3)]
        if isinstance(text := metadata.get(key), str):
            metadata[key] = json.dumps(damaged_json(json.loads(text), choices))
    if isinstance(metadata, dict):
        metadata["sha256"] = NO_DIGEST
    blank = joined(header, tensors)
    digest = hashlib.sha256(blank).hexdigest().encode()
    found = _read_scores(directory, blank.replace(b'"sha256":"' + NO_DIGEST.encode(), b'"sha256":"' + digest))
    if found is None:
        return False
    scores, _ = found
    layers, experts, _ = scores.channels_LEI.shape
    assert bool((scores.channels_LEI >= 0).all() and scores.channels_LEI.isfinite().all())
    assert len(scores.names) == len(scores.top_k) == layers
    assert all(1 <= picked <= experts for picked in scores.top_k)
    assert scores.tokens_LE.shape == scores.routing_weight_sum_LE.shape == (layers, experts)
    return True


def _read_scores(directory: Path, content: bytes) -> tuple[AttributionScores, dict[str, Any]] | None:
    (directory / "scores.safetensors").write_bytes(content)
    try:
        return load_scores(directory / "scores.safetensors")
    except CoverageError as error:
        _assert_sentence(error)
        return None


def _assert_sentence(error: CoverageError) -> None:
    message = str(error)
    assert message
    assert len(message) < 2000, "the content of a file must not fill the message"


TARGETS: dict[str, Callable[[Path, bytes], bool]] = {
    "manifest": fuzz_manifest,
    "forged_manifest": fuzz_forged_manifest,
    "index": fuzz_index,
    "scores": fuzz_scores,
    "forged_scores": fuzz_forged_scores,
}


def main() -> None:
    """Run a target in atheris, which reads the other arguments."""
    import atheris  # pyright: ignore[reportMissingImports]  # by hand only

    # import again, with the branches of the readers counted
    for name in [name for name in sys.modules if name.startswith("moe_coverage_plugin")]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["moe_coverage_plugin"]):
        target = runpy.run_path(__file__)["TARGETS"][sys.argv.pop(1)]
    workspace = tempfile.TemporaryDirectory()
    atheris.Setup(sys.argv, lambda data: target(Path(workspace.name), data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
