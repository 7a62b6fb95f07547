"""What the model card of a pruned model takes from the card of its base model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

CARD_NAME = "README.md"
# marks cards that this package wrote
TAG = "moe-coverage"
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
HUB = "https://huggingface.co"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


@dataclass(frozen=True)
class Origin:
    """The base model of a pruned model, as its card describes it.

    Attributes:
        name: name on the hub, or of the directory; empty if unknown.
        base_model: name on the hub; ``None`` if the model is from a directory that does not name it.
        inherited: fields of the front matter that also apply to the pruned model.
    """

    name: str = ""
    base_model: str | None = None
    inherited: dict[str, Any] = field(default_factory=dict)


def read_origin(source: str) -> Origin:
    """Read the card beside a model's weights, in its directory or in the hub's cache. The hub is not contacted.

    For a checkpoint that was pruned before, the base model is that of the checkpoint.

    Args:
        source: directory, or name on the hub, as in ``model.name_or_path``; empty for a model that was never on disk.
    """
    directory = Path(source)
    if source and directory.is_dir():
        front_matter = _front_matter(directory / CARD_NAME)
        pruned = TAG in _strings(front_matter.get("tags"))
        named = front_matter.get("base_model") if pruned else _cached_name(directory)
        base_model = named if isinstance(named, str) else None
        name = base_model or ("" if pruned else directory.absolute().name)
    elif HUB_ID.fullmatch(source):
        cached = try_to_load_from_cache(source, CARD_NAME)
        front_matter = _front_matter(Path(cached)) if isinstance(cached, str) else {}
        name = base_model = source
    else:
        return Origin()
    inherited = {key: front_matter[key] for key in INHERITED if _strings(front_matter.get(key))}
    if "license_link" in inherited and not str(inherited["license_link"]).startswith("https://"):
        # relative to the card of the base model
        link = inherited.pop("license_link")
        if base_model is not None:
            inherited["license_link"] = f"{HUB}/{base_model}/blob/main/{link}"
    return Origin(name, base_model, inherited)


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        # a ModelCard would warn about a card without front matter, and fails at keys that are not strings
        return (metadata_load(card) if card.is_file() else None) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


def _cached_name(directory: Path) -> str | None:
    """Return the name on the hub of a snapshot in the hub's cache."""
    names = (CACHED.fullmatch(part) for part in directory.absolute().parts)
    return next((f"{found[1]}/{found[2]}" for found in names if found), None)


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(each, str) for each in values) else []
