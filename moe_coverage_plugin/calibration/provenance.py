"""Where scores come from (versions, seed, model), and whether stored scores belong to a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.utils import align_module_device
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.atomic import check_place
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, uniform_shape

PACKAGES = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "torch")
# of each weight, to tell models apart
SAMPLED_VALUES = 64


def environment() -> dict[str, Any]:
    """Seed and versions of this process."""
    return {"torch_seed": torch.initial_seed(), "versions": dict(_versions())}


@cache
def _versions() -> dict[str, str]:
    """Installed versions; each is read from a file, several times a run."""
    return {package: version(package) for package in PACKAGES}


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Path, files and weights of a model, to tell whether it is the one of an earlier run.

    Files are compared by size and time of change, weights by some values of each: both take seconds, and every weight
    of a model that was changed after it was opened would take minutes.
    """
    directory = Path(model.name_or_path or "")
    files = sorted(directory.iterdir()) if model.name_or_path and directory.is_dir() else []
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return {
        "model": model.name_or_path,
        "files of the model": [[name, status.st_size, status.st_mtime_ns] for name, status in found],
        "weights of the model": _sampled_hash(model),
    }


@torch.no_grad()
def _sampled_hash(model: Module) -> str:
    digest = hashlib.sha256()
    # offloaded weights would all be copied to their execution device
    with disable_onloading():
        for path, module in model.named_modules():
            for name, tensor in module.named_parameters(recurse=False):
                # the toolkit leaves scales as allocated until they are calibrated
                if hasattr(module, "quantization_scheme") and name not in ("weight", "bias"):
                    continue
                digest.update(f"{path}.{name} {tensor.dtype} {list(tensor.shape)}".encode())
                if not tensor.is_meta and tensor.numel():
                    places = torch.linspace(0, tensor.numel() - 1, SAMPLED_VALUES).long().to(tensor.device)
                    values = tensor.detach()[torch.unravel_index(places, tensor.shape)]
                    digest.update(values.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def text_provenance(data: object) -> dict[str, Any] | None:
    """What a data set says of its text: who wrote it, and how; ``None`` if it says nothing.

    Args:
        data: a data set, or a loader of one; those of ``sample_text`` and ``moe-coverage oneshot`` have JSON as their
            description.
    """
    info = getattr(getattr(data, "dataset", data), "info", None)
    try:
        found = json.loads(getattr(info, "description", None) or "null")
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def routers_hash(layers: Sequence[MoELayer]) -> str:
    """Hash of the routers' weights, which distinguishes models of one shape; equal in 16 and 32 bits."""
    digest = hashlib.sha256()
    for layer in layers:
        for module in layer.router.modules():
            with align_module_device(module):
                for name, parameter in module.named_parameters(recurse=False):
                    digest.update(f"{layer.name} {name}".encode())
                    # a view as integers: NumPy has no bfloat16
                    weights = parameter.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
                    digest.update(weights.numpy().tobytes())
    return digest.hexdigest()


def check_scores(
    path: str, scores: AttributionScores, provenance: Mapping[str, Any], layers: Sequence[MoELayer]
) -> None:
    """Check that stored scores were measured on these experts.

    Args:
        path: file of the scores, for messages.
        scores: its scores.
        provenance: its provenance.
        layers: the layers to prune.

    Raises:
        CoverageError: they are of other layers, another shape, or another model.
    """
    names = [layer.name for layer in layers]
    if scores.names != names:
        differing = sorted(set(scores.names) ^ set(names)) or names
        raise CoverageError(
            f"{path} scores other MoE layers than the model has ({len(scores.names)} and {len(names)}, one of "
            f"them {differing[0]}): measure this model, or ignore the same layers as the run that wrote the file"
        )
    shape = (len(names), *uniform_shape(layers))
    if tuple(scores.channels_LEI.shape) != shape:
        raise CoverageError(
            f"{path} scores {list(scores.channels_LEI.shape)} layers, experts and channels, the model has "
            f"{list(shape)}: measure this model"
        )
    if provenance.get("routers_sha256") != routers_hash(layers):
        raise CoverageError(
            f"{path} was measured on another model ({provenance.get('model')}): its routers differ from these, "
            "measure this model"
        )


def check_writable(path: Path) -> None:
    """Check that a file can be written at the end of a run; directories are created as needed.

    Raises:
        CoverageError: it is a directory, or nothing can be created at its place.
    """
    if path.is_dir():
        raise CoverageError(f"{path} cannot be written because it is a directory: name a file")
    check_place(path)
