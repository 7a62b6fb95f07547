"""What an output directory has before a checkpoint is written to it."""

from __future__ import annotations

import filecmp
import json
import re
from dataclasses import dataclass
from pathlib import Path

from moe_coverage_plugin.expert_scheme import quantized_groups
from moe_coverage_plugin.files.weights import SUFFIX, weight_files
from moe_coverage_plugin.manifest import INDEX_NAME, CoverageError, Manifest, read_json

CONFIG_NAME = "config.json"
DESCRIPTIONS = (CONFIG_NAME, "generation_config.json", INDEX_NAME)
# files that some program opens as the weights of a model, unlike a Trainer's own (training_args.bin, optimizer.pt)
WEIGHTS = re.compile(
    r"[^.].*\.(safetensors|gguf|h5|msgpack|onnx)|.*\.(safetensors|bin)\.index(\.\w+)?\.json"
    r"|(pytorch_model|adapter_model|model|consolidated)\b.*\.(bin|pt|pth)"
)


@dataclass(frozen=True)
class Contents:
    """What is in a directory.

    Attributes:
        entries: whether there is anything.
        config: whether there is a config of a model.
        weights: names of weight files in the directory itself, sorted.
        manifest: of the pruned checkpoint, complete or not; ``None`` if there is none.
        complete: all weight files of the pruned checkpoint are there.
        quantized: the pruned checkpoint has quantized weights.
    """

    entries: bool
    config: bool
    weights: list[str]
    manifest: Manifest | None = None
    complete: bool = False
    quantized: bool = False

    @property
    def names(self) -> list[str]:
        """Names of what is of a model."""
        return [CONFIG_NAME] * self.config + self.weights


def read_contents(directory: Path) -> Contents:
    """Read what a directory has."""
    names = sorted(path.name for path in directory.iterdir())
    weights = [name for name in names if WEIGHTS.fullmatch(name) and not (directory / name).is_dir()]
    config = CONFIG_NAME in names
    manifest, quantized = None, False
    if config:
        try:
            manifest = Manifest.from_checkpoint(directory)
            quantized = bool(quantized_groups(read_json(directory / CONFIG_NAME).get("quantization_config")))
        except CoverageError:
            manifest = None
    return Contents(bool(names), config, weights, manifest, _is_complete(directory), quantized)


def same_files(one: Path, other: Path) -> bool:
    """Return whether two directories have the same weights and configs, byte for byte."""
    found = [sorted(path.name for path in each.glob(f"*{SUFFIX}")) for each in (one, other)]
    if found[0] != found[1] or any(_json(one / name) != _json(other / name) for name in DESCRIPTIONS):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in found[0])


def _is_complete(directory: Path) -> bool:
    try:
        return bool(weight_files(directory))
    except CoverageError:
        return False


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
