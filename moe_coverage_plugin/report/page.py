"""The page of a plan and the pictures beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_coverage_plugin.atomic_files import write_atomically
from moe_coverage_plugin.report import style
from moe_coverage_plugin.report.document import data_uri, render
from moe_coverage_plugin.report.figures import expert_figure, layer_figure, rank_colours, width_figure
from moe_coverage_plugin.report.view import PlanView, channel_groups

PAGE_NAME = "index.html"


def write_report(view: PlanView, directory: str | Path) -> None:
    """Write ``layers.png``, ``experts.png``, ``widths.png`` and, last, the self-contained ``index.html``.

    Each file is complete or not there. ``experts.png`` shows the layer with the most unequal widths; the page draws
    every layer.

    Raises:
        CoverageError: a file cannot be written.
    """
    directory = Path(directory)
    layers = style.png(layer_figure(view))
    write_atomically(directory / "layers.png", layers)
    write_atomically(directory / "experts.png", style.png(expert_figure(view, view.most_unequal_layer)))
    write_atomically(directory / "widths.png", style.png(width_figure(view)))
    columns, rows = _layer_table(view)
    page = render(
        "plan.html",
        scripts=["tables.js", "plan.js"],
        view=view,
        title=view.title or "Pruning plan",
        removed=int(view.dead_LE.sum()),
        layer=view.most_unequal_layer,
        layer_picture=data_uri(layers),
        layer_columns=columns,
        layer_rows=rows,
        data=_plan_data(view),
    )
    write_atomically(directory / PAGE_NAME, page.encode())


def _layer_table(view: PlanView) -> tuple[list[str], list[list[tuple[Any, str]]]]:
    """Names of the columns, and for every layer the values to sort by with the texts to show."""
    columns: list[tuple[str, list[tuple[Any, str]]]] = [
        ("layer", [(layer, str(layer)) for layer in range(view.layers)]),
        ("block", [(name, name) for name in view.names]),
        ("live experts", [(live, str(live)) for live in (~view.dead_LE).sum(-1).tolist()]),
        ("channels kept", [(kept, str(kept)) for kept in view.widths_LE.sum(-1).tolist()]),
    ]
    measured = [
        ("keep ratio, %", view.keep_ratio_L, 100, ".1f"),
        ("coverage, %", view.coverage_L, 100, ".1f"),
        ("loss rise", view.layer_loss_L, 1, ".4g"),
        ("smoothed", view.layer_prior_L, 1, ".4g"),
    ]
    for name, values_L, scale, number in measured:
        if values_L is not None:
            columns.append((name, [(value, format(scale * value, number)) for value in values_L.tolist()]))
    names, cells = zip(*columns, strict=True)
    return list(names), [list(row) for row in zip(*cells, strict=True)]


def _plan_data(view: PlanView) -> dict[str, Any]:
    """What the page's script draws; rounded to what can be seen, for the size of the page."""
    ends = channel_groups(view.intermediate_size)
    return {
        "channels": view.intermediate_size,
        "widths": view.widths_LE.tolist(),
        "shares": _rounded(view.score_shares(ends)),
        "coverage": _rounded(view.coverage_LE),
        "prior": _significant(view.expert_prior_LE),
        "tokens": None if view.tokens_LE is None else view.tokens_LE.tolist(),
        "colours": style.hexadecimal(style.SEQUENTIAL, 64),
        "groupColours": style.hexadecimal(rank_colours(len(ends)), len(ends)),
    }


def _rounded(shares: Tensor | None) -> list | None:
    # adding zero turns -0.0, of which a script would show the sign, into 0.0
    return None if shares is None else (shares * 1e4).round().div(1e4).add(0.0).tolist()


def _significant(values: Tensor | None) -> list | None:
    if values is None:
        return None
    values = values.detach().cpu().double()
    return [[float(f"{value:.4g}") for value in row] for row in torch.atleast_2d(values).tolist()]
