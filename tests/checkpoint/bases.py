"""Writes the checkpoints that :mod:`tests.mutations` changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint.runs import FP8, W4, prune, source
from tests.mutations import ALL, SHARED

ASYMMETRIC = W4 | {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": W4["config_groups"]["group_0"]["weights"] | {"symmetric": False},
        }
    }
}
SCHEMES: dict[str, Any] = {"w4a16": True, "fp8": FP8, "asymmetric": ASYMMETRIC}


def make_base(name: str, directory: Path) -> Path:
    """Write a checkpoint of two layers into ``directory / name``.

    Args:
        name: one of :data:`tests.mutations.ALL`, or another name of a layout and a scheme.
        directory: its model is written there, too.
    """
    family = "qwen2_moe" if name.startswith(SHARED) else "qwen3_moe"
    model = directory / "sources" / family
    if not model.exists():
        source(model, family)
    scheme = next((SCHEMES[part] for part in SCHEMES if name.endswith(part)), False)
    layout = next((layout for layout in ("padded", "uniform") if layout in name), "ragged")
    prune(model, directory / name, layout, scheme)
    return directory / name


def make_bases(directory: Path) -> None:
    """Write all of them."""
    for name in ALL:
        make_base(name, directory)
