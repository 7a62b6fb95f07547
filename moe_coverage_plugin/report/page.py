"""The page of a plan or of a pruned checkpoint, and the picture beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe_coverage_plugin.core.scores import TOKEN_FLOOR
from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.document import render
from moe_coverage_plugin.report.figures import width_figure
from moe_coverage_plugin.report.verdict import STANDS_OUT, Verdict, count, percent, verdict
from moe_coverage_plugin.report.view import PlanView, channel_groups

PAGE_NAME = "index.html"


class _Figure(NamedTuple):
    """A figure at the top of the page; ``share`` in [0, 1] is drawn as a bar."""

    label: str
    value: str
    note: str = ""
    share: float | None = None


def write_report(view: PlanView, directory: str | Path) -> None:
    """Write ``widths.png`` and the self-contained ``index.html``, which needs no network.

    Each file is either complete or not there.

    Raises:
        CoverageError: a file cannot be written.
    """
    directory = Path(directory)
    # a prior that is the same for all did not influence the plan
    view = replace(
        view, expert_prior_LE=_unless_equal(view.expert_prior_LE), layer_prior_L=_unless_equal(view.layer_prior_L)
    )
    write_atomically(directory / "widths.png", style.png(width_figure(view)))
    result = verdict(view)
    page = render(
        "plan.html",
        scripts=["tables.js", "plan.js"],
        view=view,
        title=view.title or "Pruning plan",
        verdict=result,
        figures=_figures(view),
        names=_names(view),
        layer=view.most_unequal_layer,
        layer_table=_layer_table(view),
        token_floor=TOKEN_FLOOR,
        data=_plan_data(view, result),
    )
    write_atomically(directory / PAGE_NAME, page.encode())


def _unless_equal(prior: Tensor | None) -> Tensor | None:
    return None if prior is None or bool((prior == prior.flatten()[0]).all()) else prior


def _figures(view: PlanView) -> list[_Figure]:
    """The figures that are known, in the order in which readers look for them."""
    figures = []
    if (weights := view.summary.weights) is not None:
        figures.append(_size(weights.size, weights.size_before))
        if weights.bits:
            figures.append(_Figure("Expert weights", weights.bits, weights.storage))
    kept = int(view.widths_LE.sum())
    channels = view.widths_LE.numel() * view.intermediate_size
    figures.append(_Figure("Channels kept", percent(view.keep_ratio), f"{kept:,} of {channels:,}", view.keep_ratio))
    if view.coverage is not None and view.coverage_L is not None:
        lowest = f"lowest layer {percent(float(view.coverage_L.min()))}"
        figures.append(_Figure("Coverage", percent(view.coverage), lowest, view.coverage))
    removed = int(view.removed_LE.sum())
    experts = f"{count(view.layers, 'layer')} of {count(view.experts, 'expert')}"
    figures.append(_Figure("Experts removed", f"{removed:,} of {view.widths_LE.numel():,}", experts))
    if (calibration := _calibration(view.summary.batches, view.summary.tokens)) is not None:
        figures.append(calibration)
    return figures


def _calibration(batches: int | None, tokens: int | None) -> _Figure | None:
    amounts = [count(number, noun) for number, noun in ((batches, "batch"), (tokens, "token")) if number is not None]
    return _Figure("Calibration", amounts[0], " ".join(amounts[1:])) if amounts else None


def _size(size: int, before: int | None) -> _Figure:
    if before is None:
        return _Figure("Weights on disk", _mebibytes(size))
    note = f"{percent(size / before)} of {_mebibytes(before)} before"
    return _Figure("Weights on disk", _mebibytes(size), note, min(1.0, size / before))


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.{1 if size < 100 * 2**20 else 0}f}\N{NO-BREAK SPACE}MiB"


def _names(view: PlanView) -> dict[str, str]:
    """Model and recipe, as far as they are known."""
    names = {"Model": view.summary.model, "Recipe": view.summary.recipe}
    return {label: name for label, name in names.items() if name}


def _layer_table(view: PlanView) -> dict[str, list[tuple[Any, str]]]:
    """Name of each column, and for every layer the value to sort by with the text to show."""
    kept_L = (~view.removed_LE).sum(-1).tolist()
    table = {
        "layer": list(enumerate(view.layer_labels)),
        "experts kept": [(kept, str(kept)) for kept in kept_L],
    }
    measured = [
        ("channels kept", view.keep_ratio_L, percent),
        ("coverage", view.coverage_L, percent),
        ("loss rise", view.layer_loss_L, "{:.4g}".format),
        ("prior", view.layer_prior_L, "{:.4g}".format),
    ]
    for name, values_L, text in measured:
        if values_L is not None:
            table[name] = [(value, text(value)) for value in values_L.tolist()]
    return table


def _plan_data(view: PlanView, result: Verdict) -> dict[str, Any]:
    """The values that the page's script draws, rounded to what is visible to keep the page small."""
    ends = channel_groups(view.intermediate_size)
    return {
        "channels": view.intermediate_size,
        "labels": view.layer_labels,
        "widths": view.widths_LE.tolist(),
        "shares": _rounded(view.score_shares(ends)),
        "coverage": _rounded(view.coverage_LE),
        "layerCoverage": _rounded(view.coverage_L),
        "layerLoss": _significant(view.layer_loss_L),
        "lowLayers": result.low_layers,
        "lowPoints": round(100 * STANDS_OUT),
        "prior": _significant(view.expert_prior_LE),
        "tokens": None if view.tokens_LE is None else view.tokens_LE.tolist(),
        "tokenFloor": TOKEN_FLOOR,
        "colours": style.css_colours(64),
        # no colour so dark that the marks on it would not show
        "groupColours": style.css_colours(len(ends), first=0.05),
    }


def _rounded(shares: Tensor | None) -> list | None:
    # adding zero turns -0.0, whose sign a script would show, into 0.0
    return None if shares is None else (shares * 1e4).round().div(1e4).add(0.0).tolist()


def _significant(values: Tensor | None) -> list | None:
    """Values with four significant digits."""
    if values is None:
        return None
    if values.ndim > 1:
        return [_significant(row) for row in values]
    return [float(f"{value:.4g}") for value in values.double().tolist()]
