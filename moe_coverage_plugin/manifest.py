"""The contract between the compressing and the serving half: one versioned entry of ``config.json``.

A pruned checkpoint is an ordinary compressed-tensors directory whose ``quantization_config`` has the entry
``moe_coverage``. The entry lists the width of every expert; tensors keep the names of their model family. Standard
library only, so that both halves can import this module.
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
REPORT_NAME = "moe_coverage_report.json"
PICTURES_NAME = "moe_coverage_report"
# in a subfolder, because engines load every *.safetensors of the directory itself
SCORES_NAME = "moe_coverage/scores.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PLUGIN = "moe-coverage-plugin"
"""``quant_method`` of ragged checkpoints: engines without the plugin stop with this name, at once."""
LOADER_KEY, LOADER = "experts_implementation", "moe_coverage_plugin.load"
"""In the config of ragged checkpoints: transformers stops at this name, because it has no such implementation."""
# an entry with a changed digit can be valid otherwise
CHECKSUM_KEY = "sha256"
# far above all models; a damaged entry beyond them would take minutes to check
MOST_LAYERS = 1_000
MOST_EXPERTS = 8_192
MOST_CHANNELS = 2**24
MOST_TOKENS = 2**53
# a JSON file that is nested deeper ends Python's recursion in the programs that read it
MOST_LEVELS = 64

Layout = Literal["ragged", "padded", "uniform"]


class CoverageError(ValueError):
    """A user's mistake, described in one sentence: the value, the limit and the remedy."""


@dataclass(frozen=True)
class Manifest:
    """Widths of all experts of a checkpoint, and how they were decided.

    Attributes:
        layout: ``ragged`` (every expert has its own width), ``padded`` (zero-padded to one width for the entire model)
            or ``uniform`` (pruned to one width for the entire model). Stock engines load the latter two.
        intermediate_size: channels of an expert before pruning.
        widths: for the module path of every layer's experts (``model.layers.0.mlp.experts``), the channels stored for
            each expert, in expert order. 0: the expert was removed, has no tensors, and the router must never pick it.
        block_size: every width is a multiple of it; 1 if widths are not aligned.
        provenance: versions, source model, calibration data and recipe; information for people.
        contents: names, dtypes and shapes of all tensors, and the sizes in the model's config, as they were written
            (:mod:`~.files.record`); empty in checkpoints of release 0.1.
        version: schema version of the entry.
        tokens: for the layers that were measured, the calibration tokens that the router sent to each expert before
            pruning; empty in checkpoints of release 0.1. Engines place experts on ranks by it.

    Raises:
        CoverageError: an unknown schema version, or values that contradict each other.
    """

    layout: Layout
    intermediate_size: int
    widths: dict[str, list[int]]
    block_size: int = 1
    provenance: dict[str, Any] = field(default_factory=dict)
    version: int = SCHEMA_VERSION
    contents: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # JSON may hold true and 1.0, which both equal 1
        if type(self.version) is not int or self.version != SCHEMA_VERSION:
            raise CoverageError(
                f"{CONFIG_KEY} entry has schema version {short(self.version)}, this release reads {SCHEMA_VERSION}: "
                "install the release of moe-coverage-plugin that wrote the checkpoint, or a newer one"
            )
        if self.layout not in get_args(Layout):
            raise CoverageError(
                f"{CONFIG_KEY} layout is {short(self.layout)}, known are {', '.join(get_args(Layout))}: the entry is "
                "damaged, or written by a newer release of moe-coverage-plugin"
            )
        self._check_types()
        self._check_limits()
        if not self.widths:
            raise CoverageError(
                f"{CONFIG_KEY} entry names no layer, at least 1 is needed: it is damaged, copy config.json again"
            )
        for name, widths in self.widths.items():
            self._check_layer(name, widths)
        for name, tokens in self.tokens.items():
            self._check_tokens(name, tokens)
        if self.layout != "ragged" and len(self.distinct_widths) != 1:
            raise CoverageError(
                f"{CONFIG_KEY} layout {self.layout!r} needs one width, found {short(self.distinct_widths)}: the entry "
                "is damaged, copy config.json again"
            )

    def _check_limits(self) -> None:
        sizes_and_limits = (
            ("experts in a layer", max(map(len, self.widths.values()), default=0), MOST_EXPERTS),
            ("channels in an expert (intermediate_size)", self.intermediate_size, MOST_CHANNELS),
        )
        for what, size, most in sizes_and_limits:
            _check_limit(what, size, most)

    def _check_types(self) -> None:
        sizes = (self.intermediate_size, self.block_size)
        layers = list(self.widths.items()) if isinstance(self.widths, dict) else [(None, None)]
        if (
            not all(type(size) is int for size in sizes)
            or not all(isinstance(name, str) and isinstance(widths, list) for name, widths in layers)
            or not isinstance(self.provenance, dict)
            or not isinstance(self.contents, dict)
            or not isinstance(self.tokens, dict)
        ):
            raise CoverageError(
                f"{CONFIG_KEY} entry has values of wrong types, for sizes and widths only integers are valid: it is "
                "damaged, copy config.json again"
            )
        if self.block_size < 1:
            raise CoverageError(
                f"{CONFIG_KEY} entry has block_size {self.block_size}, expected at least 1: it is damaged, copy "
                "config.json again"
            )

    def _check_layer(self, name: str, widths: list[int]) -> None:
        for expert, width in enumerate(widths):
            if type(width) is not int or not 0 <= width <= self.intermediate_size or width % self.block_size:
                raise CoverageError(
                    f"{name} expert {expert} has width {short(width)}, expected a multiple of {self.block_size} "
                    f"between 0 and {self.intermediate_size}: the {CONFIG_KEY} entry is damaged, copy config.json "
                    "again"
                )
        if not any(widths):
            raise CoverageError(
                f"{CONFIG_KEY} entry names a layer without experts, {name}: it is damaged, copy config.json again"
            )

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        # a damaged entry may have any values
        experts = len(self.widths.get(name, ()))
        fits = experts > 0 and isinstance(tokens, list) and len(tokens) == experts
        if not fits or not all(type(count) is int and 0 <= count <= MOST_TOKENS for count in tokens):
            raise CoverageError(
                f"{CONFIG_KEY} entry has tokens {short(tokens)} for {name}, expected {experts} counts between 0 and "
                f"{MOST_TOKENS}: it is damaged, copy config.json again"
            )

    @property
    def distinct_widths(self) -> list[int]:
        """All widths that occur, ascending; 0 is among them if experts were removed."""
        return sorted({width for widths in self.widths.values() for width in widths})

    @property
    def removed_experts(self) -> dict[str, list[int]]:
        """Removed experts per layer; layers without any are left out."""
        removed = {name: [e for e, width in enumerate(widths) if width == 0] for name, widths in self.widths.items()}
        return {name: experts for name, experts in removed.items() if experts}

    @property
    def declared_width(self) -> int:
        """The expert width to write into the field of the model's config that stock engines read.

        They must load the ``padded`` and ``uniform`` layouts and stop at a ``ragged`` one. Engines load a tensor that
        is smaller than its buffer silently but stop at a larger one, so the value must be smaller than at least one
        stored width.
        """
        stored = [width for width in self.distinct_widths if width > 0]
        if self.layout != "ragged" or (len(stored) == 1 and not self.removed_experts):
            return stored[0]
        return stored[0] if len(stored) > 1 else max(1, stored[0] // 2)

    def to_entry(self) -> dict[str, Any]:
        """The JSON-ready entry, with a checksum over everything else in it.

        ``removed_experts`` is written for people who read the file; reading derives it from ``widths``.
        """
        entry = json.loads(json.dumps(asdict(self) | {"removed_experts": self.removed_experts}))
        for optional in ("contents", "tokens"):
            if not entry[optional]:
                del entry[optional]
        return entry | {CHECKSUM_KEY: checksum(entry)}

    @classmethod
    def from_quantization_config(cls, quantization_config: Mapping[str, Any] | None) -> Manifest | None:
        """Read the entry of a ``quantization_config`` mapping; ``None`` if there is no such entry.

        Raises:
            CoverageError: an unknown schema version or a damaged entry.
        """
        entry = quantization_config.get(CONFIG_KEY) if isinstance(quantization_config, Mapping) else None
        if entry is None:
            return None
        if not isinstance(entry, Mapping):
            raise CoverageError(
                f"{CONFIG_KEY} entry is {short(entry)}, which is not a mapping: it is damaged, copy config.json again"
            )
        known = {key: entry[key] for key in cls.__dataclass_fields__ if key in entry}
        if isinstance(known.get("widths"), Mapping):
            _check_limit("layers", len(known["widths"]), MOST_LAYERS)
        version = known.get("version")
        if isinstance(widths := known.get("widths"), dict) and all(isinstance(name, str) for name in widths):
            # JSON writers sort names as text, which puts layer 10 before layer 2
            known["widths"] = {name: widths[name] for name in sorted(widths, key=_natural_order)}
        if version == SCHEMA_VERSION and not {"layout", "intermediate_size", "widths"} <= known.keys():
            raise CoverageError(
                f"{CONFIG_KEY} entry has no layout, intermediate_size or widths: it is damaged, copy config.json again"
            )
        manifest = cls(**{"layout": "ragged", "intermediate_size": 0, "widths": {}, "version": None} | known)
        # last, because the other checks name what is wrong
        if (stored := entry.get(CHECKSUM_KEY)) != checksum(entry):
            found = "has no" if stored is None else "does not match its"
            raise CoverageError(
                f"{CONFIG_KEY} entry {found} {CHECKSUM_KEY}, so it was changed after it was written, or written "
                "before release 0.1.0: copy config.json again, or write the checkpoint again"
            )
        return manifest

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Manifest | None:
        """Read the entry of a checkpoint directory's ``config.json``; ``None`` if there is none.

        A 16-bit checkpoint that stock engines load has the entry at the top level of the file, because transformers
        opens no ``quantization_config`` that quantizes nothing.

        Raises:
            CoverageError: as :meth:`from_quantization_config`; or the file is absent or not a JSON object.
        """
        file = Path(path) / "config.json"
        return cls.of_config(read_json(file), file)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], file: Path) -> Manifest | None:
        """Read the entry of a config that was read from a file; otherwise as :meth:`from_checkpoint`."""
        if not isinstance(quantization := config.get("quantization_config"), Mapping | None):
            raise CoverageError(
                f"quantization_config in {file} is {short(quantization)}, expected an object: it is damaged, copy "
                "the checkpoint again"
            )
        return cls.from_quantization_config(quantization) or cls.from_quantization_config(config)


def _check_limit(what: str, size: int, most: int) -> None:
    if size > most:
        raise CoverageError(
            f"{CONFIG_KEY} entry names {short(size)} {what}, at most {most} are supported: it is damaged, copy "
            "config.json again"
        )


def report_layers(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures of each layer in a checkpoint's report, by module path; empty if it has none.

    The first checkpoints have them under the key ``blocks``.
    """
    layers = report.get("layers", report.get("blocks"))
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        return {}
    return layers


def checksum(entry: Mapping[str, Any]) -> str:
    """Hash an entry without its checksum; the order of keys and the layout of the file make no difference.

    Raises:
        CoverageError: the entry has values that JSON does not have.
    """
    hashed = {key: value for key, value in entry.items() if key != CHECKSUM_KEY}
    try:
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise CoverageError(
            f"{CONFIG_KEY} entry has values that JSON does not have ({error}): it is damaged, copy config.json again"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        CoverageError: the file is absent, or is not a JSON object; a key occurs twice in one object; or values are
            nested too deep for the programs that read the file.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        _check_depth(value)
    except RecursionError as error:
        raise CoverageError(
            f"{file} cannot be read (it is nested deeper than {MOST_LEVELS} levels): copy the checkpoint again"
        ) from error
    except (OSError, ValueError) as error:
        raise CoverageError(f"{file} cannot be read ({error}): copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise CoverageError(f"{file} cannot be read (it is not a JSON object): copy the checkpoint again")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; readers differ in which of two equal keys they use."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {short(twice)} twice")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers within names by value; of two numbers the one with more digits is the larger."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
