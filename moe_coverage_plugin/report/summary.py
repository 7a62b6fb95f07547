"""What a reader of a report looks for first: model, recipe, calibration, and the size of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.report.stored_weights import StoredWeights

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Summary:
    """Empty or ``None`` if not known.

    Attributes:
        model: name of the model that is pruned.
        recipe: name of the recipe, or of its modifiers.
        batches: calibration batches.
        tokens: calibration tokens without padding.
        weights: of a checkpoint that was written.
    """

    model: str = ""
    recipe: str = ""
    batches: int | None = None
    tokens: int | None = None
    weights: StoredWeights | None = None


def summarize(
    provenance: Mapping[str, Any], scores: AttributionScores | None = None, weights: StoredWeights | None = None
) -> Summary:
    """Read a provenance; entries that are absent or of another type than expected count as not known.

    Args:
        provenance: of a score file or of a checkpoint, which a stranger may have written.
        scores: measured on the calibration text.
        weights: of a checkpoint that was written.

    Returns:
        The summary.
    """
    model, recipe, batches = (provenance.get(key) for key in ("model", "recipe", "calibration_batches"))
    return Summary(
        model=_model_name(model) if isinstance(model, str) else "",
        recipe=_modifiers(recipe) if isinstance(recipe, list) else "",
        batches=batches if type(batches) is int else None,
        tokens=None if scores is None else _tokens(scores),
        weights=weights,
    )


def _model_name(model: str) -> str:
    """A name on the hub, or the last part of a path."""
    return model if _HUB_NAME.fullmatch(model) else Path(model).name


def _modifiers(recipe: list[Any]) -> str:
    names = [str(name).removesuffix("Modifier") for entry in recipe if isinstance(entry, Mapping) for name in entry]
    return ", ".join(names)


def _tokens(scores: AttributionScores) -> int:
    """Tokens that every layer saw; a router sends each token to ``top_k`` experts."""
    return int(scores.tokens_LE[0].sum()) // scores.top_k[0]
