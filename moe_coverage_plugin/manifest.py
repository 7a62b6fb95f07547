"""The contract between the compressing and the serving half: one versioned entry of ``config.json``.

A pruned checkpoint is an ordinary compressed-tensors directory whose ``quantization_config`` carries the entry
``moe_coverage``. It says how wide every expert is; the tensors themselves keep their names. Standard library only, so
that both halves read it at no cost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, get_args

CONFIG_KEY = "moe_coverage"
SCHEMA_VERSION = 1
# beside the weights: figures of the pruning, and its scores, a safetensors file under another suffix, because engines
# load every *.safetensors of a directory
REPORT_NAME = "moe_coverage_report.json"
SCORES_NAME = "moe_coverage_scores.bin"
INDEX_NAME = "model.safetensors.index.json"
# key of the entry's own checksum: a changed digit leaves a plan that looks as good as the right one
CHECKSUM_KEY = "sha256"

Layout = Literal["ragged", "padded", "uniform"]


class CoverageError(ValueError):
    """A user's mistake, told in one sentence: the value, the limit and the remedy."""


@dataclass(frozen=True)
class Manifest:
    """Widths of all experts of a checkpoint and where they came from.

    Attributes:
        layout: ``ragged`` (every expert at its own width), ``padded`` (zero-padded to one width for the whole model)
            or ``uniform`` (pruned to one width for the whole model). Stock engines load the latter two.
        intermediate_size: channels of an expert before pruning.
        widths: for the module path of every layer's experts (``model.layers.0.mlp.experts``), the channels stored for
            each expert, in expert order. 0: the expert was removed, has no tensors, and the router must never pick it.
        block_size: every width is a multiple of it; 1 where widths are not aligned.
        provenance: versions, source model, scores and recipe behind the widths; for people, never read back.
    """

    layout: Layout
    intermediate_size: int
    widths: dict[str, list[int]]
    block_size: int = 1
    provenance: dict[str, Any] = field(default_factory=dict)
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        # the file may say anything, and True and 1.0 equal 1
        if type(self.version) is not int or self.version != SCHEMA_VERSION:
            raise CoverageError(
                f"{CONFIG_KEY} entry has schema version {short(self.version)}, this release reads {SCHEMA_VERSION}: "
                "install the release of moe-coverage-plugin that wrote the checkpoint, or a newer one"
            )
        if self.layout not in get_args(Layout):
            raise CoverageError(
                f"{CONFIG_KEY} layout is {short(self.layout)}, known are {', '.join(get_args(Layout))}"
            )
        self._check_types()
        if not self.widths:
            raise CoverageError(f"{CONFIG_KEY} entry names no layer: the checkpoint was not written completely")
        for name, widths in self.widths.items():
            self._check_layer(name, widths)
        if self.layout != "ragged" and len(self.distinct_widths) != 1:
            raise CoverageError(
                f"{CONFIG_KEY} layout {self.layout!r} needs one width, found {short(self.distinct_widths)}"
            )

    def _check_types(self) -> None:
        sizes = (self.intermediate_size, self.block_size)
        layers = list(self.widths.items()) if isinstance(self.widths, dict) else [(None, None)]
        if (
            not all(type(size) is int for size in sizes)
            or not all(isinstance(name, str) and isinstance(widths, list) for name, widths in layers)
            or not isinstance(self.provenance, dict)
        ):
            raise CoverageError(f"{CONFIG_KEY} entry holds other types than it should: it is damaged")
        if self.block_size < 1:
            raise CoverageError(
                f"{CONFIG_KEY} entry has block_size {self.block_size}, at least 1 is right: it is damaged"
            )

    def _check_layer(self, name: str, widths: list[int]) -> None:
        for expert, width in enumerate(widths):
            if type(width) is not int or not 0 <= width <= self.intermediate_size or width % self.block_size:
                raise CoverageError(
                    f"{name} expert {expert} has width {short(width)}, expected a multiple of {self.block_size} "
                    f"between 0 and {self.intermediate_size}: the {CONFIG_KEY} entry is damaged"
                )
        if not any(widths):
            raise CoverageError(f"{CONFIG_KEY} entry names a layer without experts, {name}: it is damaged")

    @property
    def distinct_widths(self) -> list[int]:
        """All widths that occur, ascending; 0 where experts were removed."""
        return sorted({width for widths in self.widths.values() for width in widths})

    @property
    def removed_experts(self) -> dict[str, list[int]]:
        """Removed experts per layer; layers without any are left out."""
        dead = {name: [e for e, width in enumerate(widths) if width == 0] for name, widths in self.widths.items()}
        return {name: experts for name, experts in dead.items() if experts}

    @property
    def declared_width(self) -> int:
        """The expert width to write where stock engines look for it.

        They must load the ``padded`` and ``uniform`` layouts and stop at a ``ragged`` one. Engines narrow a buffer to
        a smaller tensor silently but refuse a larger one, so the value must be smaller than at least one stored width.
        """
        stored = [width for width in self.distinct_widths if width > 0]
        if self.layout != "ragged" or (len(stored) == 1 and not self.removed_experts):
            return stored[0]
        return stored[0] if len(stored) > 1 else max(1, stored[0] // 2)

    def to_entry(self) -> dict[str, Any]:
        """The JSON-ready entry, as it will be read, with a checksum over all that is in it.

        ``removed_experts`` is written for readers of the file and derived when read.
        """
        entry = json.loads(json.dumps(asdict(self) | {"removed_experts": self.removed_experts}))
        return entry | {CHECKSUM_KEY: checksum(entry)}

    @classmethod
    def from_quantization_config(cls, quantization_config: Mapping[str, Any] | None) -> Manifest | None:
        """Read the entry of a ``quantization_config`` mapping; ``None`` where there is no such entry.

        Raises:
            CoverageError: for an unknown schema version or a damaged entry.
        """
        entry = quantization_config.get(CONFIG_KEY) if isinstance(quantization_config, Mapping) else None
        if entry is None:
            return None
        if not isinstance(entry, Mapping):
            raise CoverageError(f"{CONFIG_KEY} entry is no mapping: it is damaged")
        known = {key: entry[key] for key in cls.__dataclass_fields__ if key in entry}
        version = known.get("version")
        if isinstance(widths := known.get("widths"), dict) and all(isinstance(name, str) for name in widths):
            # JSON writers sort names as text, which has layer 10 before layer 2
            known["widths"] = {name: widths[name] for name in sorted(widths, key=_numbers_as_such)}
        if version == SCHEMA_VERSION and not {"layout", "intermediate_size", "widths"} <= known.keys():
            raise CoverageError(f"{CONFIG_KEY} entry lacks layout, intermediate_size or widths: it is damaged")
        manifest = cls(**{"layout": "ragged", "intermediate_size": 0, "widths": {}, "version": None} | known)
        # last, so that what is wrong is named where it can be
        if (stored := entry.get(CHECKSUM_KEY)) != checksum(entry):
            found = "has no" if stored is None else "does not match its"
            raise CoverageError(
                f"{CONFIG_KEY} entry {found} {CHECKSUM_KEY}, so it was changed after it was written, or written "
                "before release 0.1.0: copy config.json again, or write the checkpoint again"
            )
        return manifest

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Manifest | None:
        """Read the entry of a checkpoint directory's ``config.json``; ``None`` where there is none.

        A 16-bit checkpoint that stock engines load has it beside the ``quantization_config``, which must be absent.

        Raises:
            CoverageError: as :meth:`from_quantization_config`, and for a file that is absent or no JSON object.
        """
        config = read_json(Path(path) / "config.json")
        return cls.from_quantization_config(config.get("quantization_config")) or cls.from_quantization_config(config)


def report_layers(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures of each layer in a checkpoint's report, by module path; empty where there are none.

    Releases before 0.2 wrote them under another key.
    """
    layers = report.get("layers", report.get("blocks"))
    return layers if isinstance(layers, Mapping) else {}


def checksum(entry: Mapping[str, Any]) -> str:
    """Hash of all that an entry says, however a JSON writer lays it out, save what it says its checksum is."""
    said = {key: value for key, value in entry.items() if key != CHECKSUM_KEY}
    try:
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise CoverageError(f"{CONFIG_KEY} entry holds what no JSON file can ({error}): it is damaged") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object that a file of a checkpoint holds.

    Raises:
        CoverageError: it is absent, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CoverageError(f"{file} cannot be read ({error}): copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise CoverageError(f"{file} cannot be read (it holds no JSON object): copy the checkpoint again")
    return value


def _numbers_as_such(name: str) -> list[tuple[int, str]]:
    """Key that sorts names by the numbers in them: of two numbers the one with more digits is the larger."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
