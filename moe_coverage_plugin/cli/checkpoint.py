"""Reads a checkpoint directory: JSON files, headers of weight files and scales, but no weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_coverage_plugin.expert_scheme import quantized_groups
from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.files.integrity import check_checkpoint
from moe_coverage_plugin.manifest import (
    CONFIG_KEY,
    REPORT_NAME,
    CoverageError,
    Layout,
    Manifest,
    read_json,
    report_layers,
)

EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Checkpoint:
    """A pruned checkpoint.

    Attributes:
        directory: the directory.
        config: ``config.json``, or its part for the language model.
        quantization: ``quantization_config``; empty if there is none.
        manifest: widths of all experts.
        tensors: headers of all weight files, by tensor name.
        report: figures of the layers in ``moe_coverage_report.json``; empty if there is no report that fits.
        plan: priors of the plan in the report.
        remarks: notes about the files for the user.
    """

    directory: Path
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    manifest: Manifest
    tensors: Tensors
    report: dict[str, dict[str, Any]]
    plan: dict[str, Any]
    remarks: list[str]

    def size(self, key: str) -> int:
        """Return a positive integer from the model's config.

        Raises:
            CoverageError: it is absent or something else.
        """
        value = self.config.get(key)
        if type(value) is not int or value < 1:
            raise CoverageError(
                f"{self.directory / 'config.json'} has {key} {value!r}, expected a positive integer: it is damaged, "
                "or of a family that this release does not support"
            )
        return value

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of all experts' tensors."""
        return sum(tensor.bytes for name, tensor in self.tensors.items() if EXPERT.search(name))

    @cached_property
    def other_bytes(self) -> int:
        """Bytes of all other tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values()) - self.expert_bytes

    @property
    def unpruned_bytes(self) -> int:
        """Bytes of the experts in 16 bit before pruning."""
        experts = sum(len(widths) for widths in self.manifest.widths.values())
        return 2 * 3 * experts * self.manifest.intermediate_size * self.size("hidden_size")

    @property
    def weight_groups(self) -> list[Mapping[str, Any]]:
        """The ``weights`` of all groups."""
        return [group["weights"] for group in self.groups]

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Groups of quantized weights; see :func:`~.expert_scheme.quantized_groups`."""
        return quantized_groups(self.quantization)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read everything except the weights.

    Raises:
        CoverageError: not a directory, not a pruned checkpoint, or a damaged one.
    """
    if not directory.is_dir():
        raise CoverageError(f"{directory} is not a directory: give that of a pruned checkpoint")
    file = directory / "config.json"
    config = read_json(file)
    manifest = Manifest.of_config(config, file)
    if manifest is None:
        raise CoverageError(
            f"{directory} is not a pruned checkpoint, {CONFIG_KEY} is not in its config.json: give one that "
            "ChannelPruningModifier wrote"
        )
    tensors = check_checkpoint(directory, manifest, config)
    quantization = config.get("quantization_config") or {}
    text_config = config.get("text_config") or config
    remarks: list[str] = []
    if "auto_map" in config:
        remarks.append("config.json names Python files with the model's code (auto_map), which were not run")
    layers, plan = _read_report(directory / REPORT_NAME, manifest, remarks)
    return Checkpoint(directory, text_config, quantization, manifest, tensors, layers, plan, remarks)


def _read_report(
    path: Path, manifest: Manifest, remarks: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return layers and plan of the report if it fits the widths; otherwise add a remark."""
    if not path.is_file():
        remarks.append(f"no {REPORT_NAME}, so coverage and calibration tokens are unknown")
        return {}, {}
    try:
        report = read_json(path)
        layers = report_layers(report)
        fits = bool(layers) and all(_fits(layers[name], manifest, name) for name in layers)
    except CoverageError as error:
        remarks.append(f"{error}, so coverage and calibration tokens are unknown")
        return {}, {}
    if not fits:
        remarks.append(f"{REPORT_NAME} is damaged or of another checkpoint, and was ignored")
        return {}, {}
    plan = report.get("plan")
    return dict(layers), plan if isinstance(plan, dict) else {}


def _fits(layer: Any, manifest: Manifest, name: str) -> bool:
    widths = manifest.widths.get(name)
    if not isinstance(layer, dict) or widths is None or not _fit_widths(layer.get("widths"), widths, manifest.layout):
        return False
    tokens, coverage = layer.get("tokens"), layer.get("coverage")
    counts = isinstance(tokens, list) and len(tokens) == len(widths) and all(type(count) is int for count in tokens)
    return counts and type(coverage) in (int, float)


def _fit_widths(kept: Any, stored: list[int], layout: Layout) -> bool:
    """Whether the channels that a plan kept of each expert fit those that are stored, of which some can be padding."""
    if layout != "padded":
        return kept == stored
    return (
        isinstance(kept, list)
        and len(kept) == len(stored)
        and all(type(width) is int and 0 <= width <= most for width, most in zip(kept, stored, strict=True))
    )
