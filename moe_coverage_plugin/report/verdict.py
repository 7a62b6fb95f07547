"""The result of a plan in a few sentences: how much is removed, how much importance is kept, what needs a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_coverage_plugin.core.scores import TOKEN_FLOOR
from moe_coverage_plugin.report.view import PlanView

STANDS_OUT = 0.1
"""A layer stands out if its coverage is more than this below the coverage of the median layer."""
MOST_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """Plain text.

    Attributes:
        summary: what every reader should know.
        warnings: what needs a look, a sentence or two each.
        low_layers: indices of the layers that stand out.
    """

    summary: str
    warnings: list[str]
    low_layers: list[int]


def verdict(view: PlanView) -> Verdict:
    """Sum up a plan."""
    low_layers = _low_layers(view)
    sentences = [_removed_and_kept(view)]
    if view.coverage_L is not None and view.layers > 1 and view.keep_ratio < 1 and not low_layers:
        lowest = int(view.coverage_L.argmin())
        label, coverage = view.layer_labels[lowest], percent(float(view.coverage_L[lowest]))
        sentences.append(f"The lowest layer, {label}, keeps {coverage}; no layer stands out.")
    if removed := int(view.removed_LE.sum()):
        sentences.append(f"{removed} of {count(view.removed_LE.numel(), 'expert')} {_are(removed)} removed entirely.")
    warnings = [_low(view, low_layers)] if low_layers else []
    if (rarely := _rarely_reached(view)) is not None:
        warnings.append(rarely)
    return Verdict(" ".join(sentences), warnings, low_layers)


def percent(share: float) -> str:
    """``74.0 %``, with a space that does not break."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def count(number: int, noun: str) -> str:
    """``1 expert``, ``2,000 experts``."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {plural}"


def _removed_and_kept(view: PlanView) -> str:
    if view.keep_ratio == 1:
        return "No expert channel is removed."
    removed = f"{percent(1 - view.keep_ratio)} of the expert channels are removed"
    if view.coverage is None:
        return f"{removed}. There are no channel scores, so how much importance remains is not known."
    return f"{removed}; the channels that remain keep {percent(view.coverage)} of the measured importance."


def _low_layers(view: PlanView) -> list[int]:
    if view.coverage_L is None:
        return []
    median = view.coverage_L.quantile(0.5)
    return (median - view.coverage_L > STANDS_OUT).nonzero().flatten().tolist()


def _low(view: PlanView, layers: list[int]) -> str:
    assert view.coverage_L is not None
    worst_first = sorted(layers, key=view.coverage_L.tolist().__getitem__)
    named = [f"{view.layer_labels[layer]} ({percent(float(view.coverage_L[layer]))})" for layer in worst_first]
    noun, verb, them = ("layer", "stands", "It keeps") if len(layers) == 1 else ("layers", "stand", "They keep")
    return (
        f"{noun.capitalize()} {_listed(named)} {verb} out. {them} much less importance than the median layer, which "
        f"keeps {percent(float(view.coverage_L.quantile(0.5)))}."
    )


def _rarely_reached(view: PlanView) -> str | None:
    if view.tokens_LE is None:
        return None
    places = (view.tokens_LE < TOKEN_FLOOR).nonzero().tolist()
    if not places:
        return None
    names = [f"expert {expert} of layer {view.layer_labels[layer]}" for layer, expert in places]
    without = int((view.tokens_LE == 0).sum())
    if without == len(places):
        saw = "saw no calibration token"
    else:
        none = f", {without} of them none" if without else ""
        saw = f"saw fewer than {TOKEN_FLOOR} calibration tokens{none}"
    return (
        f"{count(len(places), 'expert')} {saw}: {_listed(names)}. Scores from so few tokens are uncertain: calibrate "
        "on more text, or on more varied text."
    )


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED:,} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
