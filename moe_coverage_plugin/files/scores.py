"""Score files: the scores of a calibration run, from which widths can be planned any number of times.

A safetensors file with one tensor for every tensor of :class:`AttributionScores` that was measured, bit for bit. Its
metadata hold the name and version of the format, the other fields, what the scores were measured on, and the sha256 of
the file, computed with zeros at the place of the digest. The file is not a pickle, so that it is safe to open a file
from an untrusted source.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moe_coverage_plugin.core.checks import require_non_negative
from moe_coverage_plugin.core.kept_experts import RouterNeeds
from moe_coverage_plugin.core.scores import AttributionScores, StoredMetric
from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import SCORES_NAME, CoverageError

FORMAT = "moe_coverage_scores"
SCHEMA_VERSION = 2
# of each version that can be read, the tensors whose name in the file is not that of their field
RENAMED = {"1": {"routing_weight_sum_LE": "gate_sum_LE"}, str(SCHEMA_VERSION): {}}
# where checkpoints with files of version 1 have them
FIRST_NAME = "moe_coverage_scores.bin"

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header."""

NO_DIGEST = "0" * 64
INTEGERS = ("tokens_LE", "few_tokens_LE")
OTHERS = ("names", "top_k", "channel_metric", "routers")
TENSORS = [field.name for field in fields(AttributionScores) if field.name not in OTHERS]
REQUIRED = {field.name for field in fields(AttributionScores) if field.name in TENSORS and field.default is not None}


def save_scores(path: str | Path, scores: AttributionScores, provenance: dict[str, Any]) -> None:
    """Write a score file, complete or not at all.

    Args:
        path: any name; directories are created as needed.
        scores: on any device; stored as float64 and int64.
        provenance: JSON-ready; what the scores were measured on, as information for people.

    Raises:
        CoverageError: channel scores are NaN, infinite or negative; tensors have different numbers of layers, experts
            or channels; or the file cannot be written.
    """
    found = {name: tensor for name in TENSORS if (tensor := getattr(scores, name)) is not None}
    _check_saved_shapes(len(scores.names), found)
    _check_channels(scores.channels_LEI)
    tensors = {name: _stored(name, tensor) for name, tensor in found.items()}
    metadata = {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "names": json.dumps(scores.names),
        "top_k": json.dumps(scores.top_k),
        "channel_metric": scores.channel_metric,
        # files of earlier releases lack it
        **({} if scores.routers is None else {"routers": json.dumps(scores.routers)}),
        "provenance": json.dumps(provenance, sort_keys=True),
        "sha256": NO_DIGEST,
    }
    blank = save(tensors, metadata)
    start, stop = _digest_span(blank, NO_DIGEST)
    write_atomically(Path(path), blank[:start] + hashlib.sha256(blank).hexdigest().encode() + blank[stop:])


def load_scores(path: str | Path) -> tuple[AttributionScores, dict[str, Any]]:
    """Read a score file of this or an earlier release.

    Returns:
        The scores as they were saved, bit for bit, and their provenance.

    Raises:
        CoverageError: the file is absent, damaged, of another kind or of an unknown schema version.
    """
    path = Path(path)
    if not path.is_file():
        raise CoverageError(
            f"there is no score file {path}: give the {SCORES_NAME} of a checkpoint, or a file that "
            "AttributionModifier(save_scores=...) wrote"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            _check_kind(path, metadata)
            _check_digest(path, metadata)
            scores = _read(file, metadata)
            provenance = _json(metadata, "provenance", dict)
        _check_channels(scores.channels_LEI)
    except (OSError, SafetensorError) as error:
        raise CoverageError(
            f"{path} cannot be read ({_one_line(error)}): it was cut off or is not a score file, give another file"
        ) from error
    except _DamagedError as error:
        raise CoverageError(f"{path} {error}: the file is damaged, copy it again or measure again") from error
    return scores, provenance


def find_scores(checkpoint: Path) -> Path | None:
    """Return the score file of a checkpoint of this or an earlier release; ``None`` if it has none."""
    return next((file for name in (SCORES_NAME, FIRST_NAME) if (file := checkpoint / name).is_file()), None)


def copy_scores(checkpoint: Path, directory: Path) -> None:
    """Copy the score file of a checkpoint, if it has one, to its place in another directory."""
    if (scores := find_scores(checkpoint)) is not None:
        copy = directory / SCORES_NAME
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(scores, copy)


class _DamagedError(Exception):
    """What is wrong with a file, as the rest of a sentence that begins with its name."""


def _check_saved_shapes(layers: int, tensors: dict[str, Tensor]) -> None:
    """Check scores that a user computed, so that a mistake is reported before a model is opened."""
    experts, channels = tensors["tokens_LE"].shape[-1], tensors["channels_LEI"].shape[-1]
    for name, tensor in tensors.items():
        axes = len(name.rpartition("_")[2])
        shape = (layers, experts, channels)[:axes]
        if tensor.shape != shape or 0 in shape:
            raise CoverageError(
                f"{name} has shape {list(tensor.shape)}, {layers} layers of {experts} experts need "
                f"[{', '.join([str(layers), str(experts), 'channels'][:axes])}]: stack the scores of all layers"
            )


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.int64 if name in INTEGERS else torch.float64
    # safetensors stores no tensors that share memory
    return tensor.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)


def _check_channels(channels_LEI: Tensor) -> None:
    require_non_negative(channels_LEI, "channel scores", ("layer", "expert"))


def _check_kind(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise CoverageError(
            f"{path} is a safetensors file but holds no scores: give the {SCORES_NAME} of a checkpoint, or a file "
            "that AttributionModifier(save_scores=...) wrote"
        )
    if (version := metadata.get("schema_version")) not in RENAMED:
        raise CoverageError(
            f"{path} has schema version {version!r}, this release reads {' and '.join(RENAMED)}: measure again, or "
            "install the release of moe-coverage-plugin that wrote it"
        )


def _check_digest(path: Path, metadata: dict[str, str]) -> None:
    data = path.read_bytes()
    digest = metadata.get("sha256", "")
    start, stop = _digest_span(data, digest)
    if hashlib.sha256(data[:start] + NO_DIGEST.encode() + data[stop:]).hexdigest() != digest:
        raise _DamagedError("does not match its checksum")


def _digest_span(data: bytes, digest: str) -> tuple[int, int]:
    """Return where the digest begins and ends; the same text inside a JSON string has escaped quotes."""
    header_end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    before = b'"sha256":"'
    entry = before + digest.encode() + b'"'
    if len(digest) != len(NO_DIGEST) or data.count(entry, LENGTH_BYTES, header_end) != 1:
        raise _DamagedError("has no checksum")
    start = data.index(entry, LENGTH_BYTES) + len(before)
    return start, start + len(digest)


def _read(file: Any, metadata: dict[str, str]) -> AttributionScores:
    names, top_k = _json(metadata, "names", list), _json(metadata, "top_k", list)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise _DamagedError("does not name its layers")
    metric = metadata.get("channel_metric")
    if metric not in (known := get_args(StoredMetric)):
        raise _DamagedError(f"has channel metric {metric!r}, known are {', '.join(known)}")
    renamed = RENAMED[metadata["schema_version"]]
    name_of = {renamed.get(field, field): field for field in TENSORS}
    required = {name for name, field in name_of.items() if field in REQUIRED}
    stored = set(file.keys())
    if not required <= stored <= name_of.keys():
        wrong = sorted((required - stored) | (stored - name_of.keys()))
        raise _DamagedError(f"lacks tensors or has unknown ones ({_one_line(', '.join(wrong))})")
    _check_shapes(file, len(names), stored)
    tensors = {name_of[name]: file.get_tensor(name) for name in stored}
    experts = tensors["tokens_LE"].shape[1]
    if len(top_k) != len(names) or not all(type(picked) is int and 1 <= picked <= experts for picked in top_k):
        raise _DamagedError(f"does not say for {len(names)} layers how many of {experts} experts each picks")
    routers = _read_routers(metadata, len(names), experts) if "routers" in metadata else None
    return AttributionScores(
        names=names, top_k=top_k, channel_metric=cast(StoredMetric, metric), routers=routers, **tensors
    )


def _read_routers(metadata: dict[str, str], layers: int, experts: int) -> list[RouterNeeds]:
    found = _json(metadata, "routers", list)
    pairs = [pair for pair in found if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)]
    routers = [RouterNeeds(*pair) for pair in pairs]
    if len(routers) != layers or len(found) != layers:
        raise _DamagedError(f"does not say for {layers} layers which experts their routers need")
    for groups, needed in routers:
        if not (1 <= groups <= experts and experts % groups == 0 and 1 <= needed <= experts // groups):
            raise _DamagedError(f"has a router of {groups} groups that need {needed} of {experts} experts")
    return routers


def _check_shapes(file: Any, layers: int, stored: set[str]) -> None:
    shape = file.get_slice("channels_LEI").get_shape()
    if len(shape) != 3 or shape[0] != layers or min(shape) < 1:
        raise _DamagedError(f"has channel scores of shape {shape} for {layers} layers")
    for name in sorted(stored):
        axes = len(name.rpartition("_")[2])
        dtype = "I64" if name in INTEGERS else "F64"
        found = file.get_slice(name)
        if found.get_shape() != shape[:axes] or found.get_dtype() != dtype:
            raise _DamagedError(
                f"has {name} as {found.get_dtype()} {found.get_shape()}, expected {dtype} {shape[:axes]}"
            )


def _json(metadata: dict[str, str], key: str, kind: type) -> Any:
    try:
        value = json.loads(metadata.get(key, "null"))
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"has {key} that are not JSON") from error
    if not isinstance(value, kind):
        raise _DamagedError(f"has {key} of the wrong type")
    return value


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
